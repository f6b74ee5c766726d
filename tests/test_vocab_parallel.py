"""linear_cross_entropy with a vocabulary sharded over 1, 2, 3 and 4 processes: the results of one process."""

import textwrap
from functools import cache

from torch_aclnn_ops import functional as F
from torch_aclnn_ops._torch_compat.public import COMPILES_COLLECTIVES
from torch_aclnn_ops.functional._head import shards

import pytest
import torch
import torch.distributed as dist
from host_npu.testing import run
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from tests import _vocab_parallel as cases
from tests._children import run_code
from tests._distributed import groups, selected

# The error allowed in addition to that of one process, relative to a tensor's largest number. The gradient of a 16-bit
# input may be rounded on each rank.
TOLERANCE = {"float64": 1e-13, "float32": 5e-7, "bfloat16": 2**-8, "float16": 2**-11}
# Under autocast, an NPU rounds the logits and the gradient of the weight.
ROUNDINGS = {"autocast": 2}


@pytest.fixture(scope="module", params=groups(1, 2, 3, 4, often={("npu", 2), ("cpu", 2)}), ids=str)
def found(request):
    device, world_size = request.param
    return run(cases.results, world_size, selected(request, "name", found=request.param), device=device)


@cache
def _of_one_process(name, dtype):
    function, *_ = cases.CASES[name]
    found = function(cases.Vocabulary(dtype=cases.DTYPES[dtype]))
    return {key: tensor.detach() for key, tensor in found.items()}


def _joined(key, tensors):
    kind = key.partition(".")[0]
    if kind == "shard":
        return [torch.cat(tensors)]
    return [sum(tensors)] if kind == "part" else tensors


def _error(tensor, truth):
    if not truth.is_floating_point() or truth.numel() == 0:
        return float((tensor != truth).any())
    return float((tensor.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.every_nth_case(5)
def test_results_equal_those_of_one_process(found, name):
    dtype = cases.CASES[name][2]
    assert not any(isinstance(of_rank[name], str) for of_rank in found), [of_rank[name] for of_rank in found]
    tolerance = TOLERANCE[dtype] * ROUNDINGS.get(name, 1)
    truth, single = _of_one_process(name, "float64"), _of_one_process(name, dtype)
    assert found[0][name].keys() == truth.keys()
    for key in truth:
        tensors = [of_rank[name][key] for of_rank in found]
        assert not key.startswith("copy") or all(torch.equal(tensor, tensors[0]) for tensor in tensors), key
        for tensor in _joined(key, tensors):
            assert tensor.dtype == single[key].dtype and tensor.shape == single[key].shape, key
            assert _error(tensor, truth[key]) <= _error(single[key], truth[key]) + tolerance, key


INPUT, HEAD, TARGET = torch.ones(3, 2), torch.zeros(4, 2), torch.tensor([0, 7, 5])

GROUP = "process_group must be None or a torch.distributed.ProcessGroup that contains this process"
ERROR_INPUTS = {
    "no group": ({"process_group": "gloo"}, TypeError, f"{GROUP}, but it is 'gloo'"),
    "group of others": ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, TypeError, GROUP),
    "sizes alone": ({"process_group": None, "vocab_sizes": (4, 4)}, ValueError, "vocab_sizes must be None if"),
    "no sequence": (
        {"vocab_sizes": 4},
        TypeError,
        "vocab_sizes must be None or a sequence of 2 integers, the rows of linear_weight on each rank of"
        " process_group, but it is 4",
    ),
    "no whole sizes": ({"vocab_sizes": (4, 4.0)}, TypeError, r"but it is \(4, 4.0\)"),
    "sizes of three": ({"vocab_sizes": (4, 4, 4)}, ValueError, r"a sequence of 2 integers.* \(4, 4, 4\)"),
    "other size": (
        {"vocab_sizes": (5, 3)},
        ValueError,
        r"vocab_sizes must have linear_weight's 4 rows at rank 0, but it has 5: vocab_sizes is \(5, 3\)",
    ),
    "no classes": (
        {"vocab_sizes": (4, 0)},
        ValueError,
        r"linear_weight must have a row on every rank, but the ranks have \(4, 0\)",
    ),
    "no head": ({"linear_weight": None}, TypeError, "linear_weight must be a Tensor of shape"),
    "bias of all": ({"linear_bias": torch.ones(8)}, RuntimeError, r"linear_bias must have shape \[4\].*\[8\]"),
    "class weight of a shard": ({"weight": torch.ones(4)}, RuntimeError, r"weight must have shape \[8\].*\[4\]"),
    "target beyond all": ({"target": torch.tensor([0, 8, 1])}, IndexError, "Target 8 is out of bounds"),
    "target beyond a shard": (
        {"process_group": None, "vocab_sizes": None},
        IndexError,
        "^Target 7 is out of bounds. linear_cross_entropy: target must be from 0 to 3, .* If linear_weight is a shard"
        " of the head, pass process_group or fsdp_module.$",
    ),
    "probabilities of a shard": ({"target": torch.ones(3, 4)}, RuntimeError, r"target must have shape .* \[3, 8\]"),
    "sparse input": ({"input": INPUT.to_sparse()}, TypeError, "process_group must not .* left to torch's function"),
    "integers": (
        {"input": INPUT.long(), "linear_weight": HEAD.long()},
        RuntimeError,
        "input must have a floating-point dtype, but it has torch.int64",
    ),
}


@pytest.mark.parametrize("error_input", ERROR_INPUTS)
def test_invalid_arguments_raise_a_clear_error(group_of_two, error_input):
    changed, error, sentence = ERROR_INPUTS[error_input]
    arguments = {"input": INPUT, "linear_weight": HEAD, "target": TARGET, "process_group": group_of_two}
    arguments |= {"vocab_sizes": (4, 4)} | changed
    with pytest.raises(error, match=sentence):
        F.linear_cross_entropy(**arguments)


def _dtensor(tensor, *placements, mesh=None):
    mesh = init_device_mesh("cpu", (2,)) if mesh is None else mesh
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


DTENSOR_ERROR_INPUTS = {
    "replicated head": (
        lambda: {"linear_weight": _dtensor(HEAD, Replicate())},
        r"linear_weight must be a plain tensor, or a DTensor with placements \(Shard\(dim=0\),\) on a mesh of one"
        r" dimension, but it has placements \(Replicate\(\),\) on a mesh of shape \(2,\); if it is sharded by"
        r" fully_shard \(FSDP2\), pass the model that owns it as fsdp_module, else redistribute it",
    ),
    "head that FSDP2 may have sharded": (
        lambda: {"process_group": None},
        "linear_weight must be a plain tensor if input is one and neither process_group nor fsdp_module is given,"
        r" but it is a DTensor with placements \(Shard\(dim=0\),\), which is ambiguous: if it is sharded by fully_shard"
        r" \(FSDP2\), pass the model that owns it as fsdp_module; if the ranks share the vocabulary, and all have the"
        " same input, pass the group of its mesh as process_group, or an input that is a DTensor with",
    ),
    "local shard alone": (
        lambda: {"process_group": None, "linear_weight": _dtensor(HEAD, Shard(0)).requires_grad_().to_local()},
        r"linear_weight must have all classes, but it is the to_local\(\) of a DTensor with placements"
        r" \(Shard\(dim=0\),\); if it is sharded",
    ),
    "input on another mesh": (
        lambda: {"process_group": None, "input": _dtensor(INPUT, Replicate(), mesh=init_device_mesh("cpu", (1,)))},
        r"input must be a DTensor with placements \(Replicate\(\),\) on linear_weight's mesh",
    ),
    "head of features": (lambda: {"linear_weight": _dtensor(HEAD, Shard(1))}, r"it has placements \(Shard\(dim=1\),\)"),
    "plain bias": (lambda: {"linear_bias": torch.ones(4)}, "linear_bias must be a DTensor with placements"),
    "sharded input": (lambda: {"input": _dtensor(INPUT, Shard(0))}, r"input must be .*placements \(Replicate\(\),\)"),
    "sharded target": (lambda: {"target": _dtensor(TARGET, Shard(0))}, "target must be a DTensor"),
    "plain head": (
        lambda: {"linear_weight": HEAD, "linear_bias": _dtensor(torch.ones(4), Shard(0))},
        r"linear_bias must be a plain tensor if linear_weight is one, but it is a DTensor with placements"
        r" \(Shard\(dim=0\),\)",
    ),
    "other group": (lambda: {"process_group": dist.new_group([0])}, "vocab_sizes must be a sequence of 1 integers"),
}


@pytest.mark.parametrize("error_input", DTENSOR_ERROR_INPUTS)
def test_other_placements_raise_a_clear_error(group_of_two, error_input):
    make, sentence = DTENSOR_ERROR_INPUTS[error_input]
    arguments = {"input": INPUT, "linear_weight": _dtensor(HEAD, Shard(0)), "target": TARGET}
    arguments |= {"process_group": group_of_two} | make()
    with pytest.raises(ValueError, match=f"linear_cross_entropy: .*{sentence}"):
        F.linear_cross_entropy(**arguments)


def test_compiled_code_needs_the_sizes(group_of_two):
    compiled = torch.compile(F.linear_cross_entropy, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="vocab_sizes must be given under torch.compile"):
        compiled(INPUT, HEAD, TARGET, process_group=group_of_two)


def test_compiled_code_of_torch_2_11_raises(group_of_two, monkeypatch):
    monkeypatch.setattr(shards, "COMPILES_COLLECTIVES", False)
    compiled = torch.compile(F.linear_cross_entropy, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="process_group must be None under torch.compile with torch 2.11"):
        compiled(INPUT, HEAD, TARGET, process_group=group_of_two, vocab_sizes=(4, 4))


@pytest.mark.skipif(not COMPILES_COLLECTIVES, reason="every call raises")
def test_a_transform_inside_a_compiled_function_raises(group_of_two):
    def loss(input):
        return F.linear_cross_entropy(input, HEAD, TARGET, process_group=group_of_two, vocab_sizes=(4, 4))

    compiled = torch.compile(torch.func.grad(loss), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="process_group must be None where torch.compile traces a transform"):
        compiled(INPUT)


@pytest.mark.parametrize(("name", "strict"), [("cross_entropy", False), ("cross_entropy", True), ("kl_div", False)])
def test_an_export_raises(group_of_two, name, strict):
    class Loss(torch.nn.Module):
        def forward(self, input):
            sharded = {"process_group": group_of_two, "vocab_sizes": (4, 4)}
            if name == "kl_div":
                return F.linear_kl_div(input, HEAD, teacher_input=input.detach(), teacher_weight=HEAD, **sharded)
            return F.linear_cross_entropy(input, HEAD, TARGET, **sharded)

    with pytest.raises(Exception, match=f"linear_{name}: process_group must be None under torch.export"):
        torch.export.export(Loss(), (INPUT,), strict=strict)


def test_batched_gradients_raise(group_of_two):
    input, head, target = torch.randn(3, 4, requires_grad=True), torch.zeros(5, 4), torch.arange(3)
    options = {"process_group": dist.group.WORLD, "vocab_sizes": (5, 5)}
    loss = F.linear_cross_entropy(input, head, target, **options)
    with pytest.raises(NotImplementedError, match="with is_grads_batched=True, which does not batch collectives"):
        torch.autograd.grad(loss, input, torch.ones(2, dtype=loss.dtype), is_grads_batched=True)


def test_everything_else_works_with_a_torch_without_distributed():
    program = """
        import torch.distributed as dist

        dist.is_available = lambda: False
        del dist.ProcessGroup, dist.GroupMember
        from torch_aclnn_ops import functional as F
        import torch

        arguments = torch.ones(3, 2), torch.ones(4, 2), torch.tensor([0, 3, 1])
        F.linear_cross_entropy(*arguments)
        try:
            F.linear_cross_entropy(*arguments, process_group=0)
        except TypeError as error:
            print(error)
    """
    result = run_code(textwrap.dedent(program), TORCH_DEVICE_BACKEND_AUTOLOAD="0")  # imports torch first
    assert "process_group must be None or a torch.distributed.ProcessGroup" in result.stdout, result.stderr
