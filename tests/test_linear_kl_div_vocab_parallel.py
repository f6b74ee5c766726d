"""linear_kl_div with a vocabulary sharded over two processes: mismatching calls, compiled code, and DTensors."""

import re
from functools import partial

from torch_aclnn_ops import functional as F

import pytest
import torch
import torch.distributed as dist
from host_npu.testing import results_of, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests._linear_kl_div import CLASSES, FEATURES, ROWS, TARGET, draw, head_of_teacher, student
from tests._pages import blocks
from tests._pages import run as run_block

GATHERED = 'full_tensor(grad_placements=[Partial("avg")])'


def half(number):
    """Return the slice of this process's classes or rows."""
    return slice(0, 5) if dist.get_rank() == 0 else slice(5, number)


def second_backward(device):
    """A graph that is differentiated twice, and then again."""
    (input, weight, _), (rows, head, _), here = student(), head_of_teacher(), half(CLASSES)
    weight = weight.detach()[here].requires_grad_()
    loss = F.linear_kl_div(input, weight, rows, head[here], process_group=dist.group.WORLD)
    first = torch.autograd.grad(loss, (input, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (input, weight), retain_graph=True)
    torch.testing.assert_close(first, again)
    torch.autograd.grad(loss, input, create_graph=True)


def different(device, **of_first):
    """A call of the first process that differs from the other's."""
    arguments = {"divergence": "forward_kl", "temperature": 1.0, "chunk_size": 4, "reduction": "mean", "rows": ROWS}
    arguments |= {"seed": 0, "target": TARGET, "token_weight": None} | (of_first if dist.get_rank() == 0 else {})
    number, seed = arguments.pop("rows"), arguments.pop("seed")
    input, here = draw(number, 6, seed=seed).requires_grad_(), half(CLASSES)
    rows, head, _ = head_of_teacher()
    arguments["target"] = arguments["target"][:number]
    group = dist.group.WORLD
    F.linear_kl_div(input, draw(CLASSES, 6)[here], rows[:number], head[here], **arguments, process_group=group)


def whole_head(device):
    """A call in which every process has the whole head."""
    input, weight, _ = student()
    rows, head, _ = head_of_teacher()
    F.linear_kl_div(input, weight, rows, head, process_group=dist.group.WORLD)


def compiled(device):
    """A call in compiled code, and in eager mode."""
    (input, weight, _), (rows, head, _), here = student(), head_of_teacher(), half(CLASSES)
    options = {"process_group": dist.group.WORLD, "vocab_sizes": (5, CLASSES - 5)}

    def function(input):
        return 2 * F.linear_kl_div(2 * input, weight.detach()[here], rows, head[here], **options)

    return [torch.compile(function, backend="aot_eager")(input).detach(), function(input).detach()]


def student_layer():
    """The student's head, as a layer."""
    layer = torch.nn.Linear(FEATURES, CLASSES, bias=False, dtype=torch.float64)
    layer.weight.data.copy_(student()[1].detach())
    return layer


def shard_with_a_group(device):
    """The to_local() of a head whose vocabulary the processes share."""
    mesh = init_device_mesh("cpu", (2,))
    weight, head = (
        distribute_tensor(one.detach(), mesh, [Shard(0)]).requires_grad_()
        for one in (student_layer().weight, head_of_teacher()[1])
    )
    heads = {"teacher_weight": head.to_local().detach(), "process_group": mesh.get_group()}
    return F.linear_kl_div(student()[0], weight.to_local(), head_of_teacher()[0], **heads).detach()


class Student(torch.nn.Module):
    """A model that computes the loss of this process's part of the rows."""

    def __init__(self):
        super().__init__()
        self.head = student_layer()

    def forward(self):
        hidden, *teacher = _rows_of_this_process().values()
        return F.linear_kl_div(hidden, self.head.weight, *teacher, reduction="sum") * (dist.get_world_size() / ROWS)


def _rows_of_this_process():
    (rows, head, _), here = head_of_teacher(), half(ROWS)
    return {"hidden": student()[0].detach()[here], "teacher_hidden": rows[here], "teacher_head": head}


def in_the_forward_pass(device):
    """A head that FSDP2 has sharded with its model, with the loss in the model's forward pass."""
    model = fully_shard(Student())
    loss = model()
    loss.backward()
    return [loss.detach(), model.head.weight.grad.full_tensor()]


def lines_of_the_guide(device):
    """The code in docs/losses_on_a_head.md, with a head sharded by FSDP2."""
    model = fully_shard(Student())
    names = {"F": F, "model": model, "world_size": dist.get_world_size(), "rows_of_all_ranks": ROWS}
    names |= _rows_of_this_process()
    [lines] = [block for block in blocks("docs/losses_on_a_head.md") if "fully_shard" in block.title]
    run_block(lines, names)
    names["loss"].backward()
    return [names["loss"].detach(), model.head.weight.grad.full_tensor()]


DIFFERENT = {
    "rows": ({"rows": 8}, "the number of rows of input"),
    "divergence": ({"divergence": "reverse_kl"}, "divergence"),
    "temperature": ({"temperature": 2.0}, "temperature"),
    "chunk_size": ({"chunk_size": 3}, "the rows per chunk, from chunk_size or max_memory,"),
    "reduction": ({"reduction": "sum"}, "reduction"),
    "hard_weight": ({"hard_weight": 0.5}, "hard_weight"),
    "input": ({"seed": 1}, "input"),
    "target": ({"target": torch.arange(ROWS)}, "target"),
    "token_weight": ({"token_weight": torch.ones(ROWS)}, "whether token_weight is given"),
    "zero_if_all_ignored": ({"zero_if_all_ignored": True}, "zero_if_all_ignored"),
}
CASES = {one.__name__: one for one in (second_backward, compiled, whole_head, shard_with_a_group)}
CASES |= {one.__name__: one for one in (in_the_forward_pass, lines_of_the_guide)}
CASES |= {f"different {name}": partial(different, **of_first) for name, (of_first, _) in DIFFERENT.items()}


def results(device):
    """Run all cases as one of the processes."""
    return results_of((name, partial(function, device)) for name, function in CASES.items())


@pytest.fixture(scope="module")
def found():
    return run(results, 2)


@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_that_differ_are_refused_on_every_rank(found, name):
    for of_rank in found:
        sentence = f"ValueError: linear_kl_div: {DIFFERENT[name][1]} must be the same on every rank"
        assert of_rank[f"different {name}"].startswith(sentence)


def test_the_whole_head_on_every_rank_is_refused(found):
    sentence = "ValueError: linear_kl_div: linear_weight must be this rank's shard of the head, but it is the same on"
    assert all(of_rank["whole_head"].startswith(sentence) for of_rank in found)


def test_a_retained_graph_gives_its_gradients_again_and_no_second_derivatives(found):
    for of_rank in found:
        assert "with process_group only first derivatives are supported" in of_rank["second_backward"]


def test_compiled_code_breaks_its_graph_at_the_call(found):
    for of_rank in found:
        torch.testing.assert_close(*of_rank["compiled"])


def test_a_sharded_head_without_a_group_is_refused_with_a_remedy(group_of_two):
    mesh = init_device_mesh("cpu", (2,))
    head = distribute_tensor(student_layer().weight.detach(), mesh, [Shard(0)]).requires_grad_()
    rows, weight = student()[0].detach(), head.to_local()
    remedies = f"pass its {re.escape(GATHERED)}.* pass its to_local.. with process_group"
    with pytest.raises(TypeError, match=f"linear_weight must be a plain tensor, but it is a DTensor.*{remedies}"):
        F.linear_kl_div(rows, head, *head_of_teacher()[:2])
    with pytest.raises(ValueError, match=r"teacher_weight must have all classes, but it is the to_local\(\) of a DTe"):
        F.linear_kl_div(rows, weight.detach(), rows, weight)


def test_the_local_tensor_of_a_dtensor_is_accepted_with_a_group(found):
    (input, weight, _), (rows, head, _) = student(), head_of_teacher()
    expected = F.linear_kl_div(input, weight, rows, head).detach()
    torch.testing.assert_close([of_rank["shard_with_a_group"] for of_rank in found], [expected] * 2)


@pytest.mark.parametrize("name", ["in_the_forward_pass", "lines_of_the_guide"])
def test_a_head_that_fsdp2_shards_has_torchs_loss_and_gradient_of_all_rows(found, name):
    (input, weight, _), (rows, head, _) = student(), head_of_teacher()
    log_probs = [torch.nn.functional.linear(*one).log_softmax(-1) for one in ((input, weight), (rows, head))]
    expected = torch.nn.functional.kl_div(*log_probs, reduction="batchmean", log_target=True)
    losses, gradients = zip(*(of_rank[name] for of_rank in found), strict=True)
    torch.testing.assert_close(sum(losses) / len(losses), expected.detach())
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, weight) * 2)
