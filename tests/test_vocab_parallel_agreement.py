"""Processes that share a vocabulary and make different calls: all raise the same error, or all results are nan."""

import math
from functools import partial

import torch_aclnn_ops
from torch_aclnn_ops import functional as F
from torch_aclnn_ops._torch_compat.public import COMPILES_COLLECTIVES

import pytest
import torch
import torch.distributed as dist
from host_npu.testing import results_of, run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

ROWS, FEATURES = 6, 8
# The classes of each rank; 128 are enough for CANN's operators, which take 16-bit inputs.
SIZES = {"few classes": (12, 10), "fused": (160, 128)}
DTYPES = {"few classes": torch.float32, "fused": torch.bfloat16}
OWN_ROWS = "; if every rank has its own rows, as with FSDP2, pass fsdp_module instead of process_group"
SAME = "must be the same on every rank of process_group, but on this one it is"
SAME_HEAD = (
    "linear_weight must be this rank's shard of the head, but it is the same on every rank of process_group, with"
    " {rows} rows; pass head.chunk(world_size)[rank]"
)


class Arguments:
    """The arguments of a rank, and the number of trained weights."""

    def __init__(self, rank, device, kind="few classes", dtype=None):
        sizes = SIZES[kind]
        self.classes, self.dtype, self.options = sum(sizes), dtype or DTYPES[kind], {"vocab_sizes": sizes}
        generator = torch.Generator().manual_seed(0)
        input, head = (torch.randn(n, FEATURES, generator=generator) for n in (ROWS, self.classes))
        self.rank, self.device = rank, device
        self.input, self.head, self.whole_head = input, head.split(sizes)[rank].clone(), head
        self.target = torch.randint(self.classes, (ROWS,), generator=generator)
        self.target[0] = 4
        self.is_trained = self.runs_backward = True

    def change(self, **values):
        """Set attributes or options; an option ``...`` is removed."""
        for name, value in values.items():
            if hasattr(self, name):
                setattr(self, name, value)
            else:
                self.options[name] = value
        self.options = {name: value for name, value in self.options.items() if value is not ...}
        return self

    def result(self):
        """Return the loss and the gradients, or the error."""
        input, head = (tensor.to(self.dtype).to(self.device) for tensor in (self.input, self.head))
        input.requires_grad_(self.is_trained)
        head.requires_grad_()
        options = tree_map_only(torch.Tensor, lambda one: one.to(self.device), self.options)
        try:
            target = self.target.to(self.device)
            loss = F.linear_cross_entropy(input, head, target, process_group=dist.group.WORLD, **options)
            found = torch.autograd.grad(loss.sum(), (input, head)) if self.runs_backward else ()
        except (ValueError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        return [loss.sum().item(), *(gradient.double().cpu().sum().item() for gradient in found)]


ORDERED = torch.arange(ROWS)
WITHOUT_SIZES = {"vocab_sizes": ...}
# Only one rank would sum gradients.
FORWARD = {"runs_backward": False}


def _third(target, value):
    return target.index_fill(0, torch.tensor([3]), value)


# Mismatches in values: the arguments of all ranks, rank 1's change, and the argument that the error names.
DIFFERENT_VALUES = {
    "inputs": ({}, lambda one: {"input": one.input + 1}, "input"),
    "last row": ({}, lambda one: {"input": one.input + torch.eye(ROWS)[-1:].T}, "input"),
    "targets": ({}, lambda one: {"target": _third(one.target, int(one.target[3] + 1) % one.classes)}, "target"),
    "order of targets": ({"target": ORDERED}, lambda one: {"target": one.target.flip(0)}, "target"),
    "ignored row": ({}, lambda one: {"target": _third(one.target, -100)}, "target"),
    "a target outside": ({}, lambda one: {"target": _third(one.target, one.classes)}, "target"),
    "targets without vocab_sizes": (WITHOUT_SIZES, lambda one: {"target": _third(one.target, 9)}, "target"),
}
# Options of all ranks, and of rank 1.
DIFFERENT_OPTIONS = {
    "reduction": ("sum", "mean"),
    "ignore_index": (4, -100),
    "softcap": (None, 2.0),
    "temperature": (1.0, 0.5),
    "label_smoothing": (0.1, 0.2),
    "lse_square_scale": (0.0, 0.5),
    "zero_if_all_ignored": (False, True),
}


# The arguments of all ranks, rank 1's change, and the beginning of every rank's error.
CASES = {
    **{
        name: (given, change, f"{argument} {SAME} different{OWN_ROWS}")
        for name, (given, change, argument) in DIFFERENT_VALUES.items()
    },
    **{
        name: ({name: value}, lambda _, name=name, other=other: {name: other}, f"{name} {SAME}")
        for name, (value, other) in DIFFERENT_OPTIONS.items()
    },
    "kind of target": (
        {},
        lambda one: {"target": torch.nn.functional.one_hot(one.target, one.classes).float()},
        f"whether target has probabilities {SAME}",
    ),
    "frozen input": (FORWARD, lambda _: {"is_trained": False}, f"whether input needs a gradient {SAME}"),
    "reduce_input_grad": (
        {"reduce_input_grad": True, **FORWARD},
        lambda _: {"reduce_input_grad": False},
        f"reduce_input_grad {SAME}",
    ),
    "a token_weight on one rank": (
        {},
        lambda _: {"token_weight": torch.ones(ROWS)},
        f"whether token_weight is given {SAME}",
    ),
    "number of rows": (
        WITHOUT_SIZES,
        lambda one: {"input": one.input[:4], "target": one.target[:4]},
        f"the number of rows of input {SAME}",
    ),
}
CASES |= {
    f"the whole head{suffix}": (
        lambda one, has_sizes=has_sizes: {
            "head": one.whole_head,
            "vocab_sizes": (one.classes, one.classes) if has_sizes else ...,
        },
        lambda _: {},
        SAME_HEAD,
    )
    for suffix, has_sizes in {"": True, " without vocab_sizes": False}.items()
}
# Arguments that CANN's operators do not support: on one rank only, the ranks would take different paths.
NOT_FUSED = {
    "chunk_size": lambda _: {"chunk_size": 3},
    "a bias": lambda one: {"linear_bias": torch.zeros(len(one.head), dtype=one.dtype)},
}


def _run(rank, device, kind, given, change, checks_values=False):
    arguments = Arguments(rank, device, kind)
    arguments.change(**(given(arguments) if callable(given) else given))
    if rank == 1:
        arguments.change(**change(arguments))
    torch_aclnn_ops.check_values(checks_values)
    try:
        return arguments.result()
    finally:
        torch_aclnn_ops.check_values(False)


def _agreeing(rank, device, kind):
    """Return the results if only the last bits of the input differ."""
    arguments = Arguments(rank, device, kind, torch.bfloat16)
    return arguments.change(input=arguments.input * (1 + 2.0**-7 * (rank == 1))).result()


def _constant_head(rank, device, kind):
    """Return the results of equal shards, because all weights are equal."""
    arguments = Arguments(rank, device, kind)
    half, weight = arguments.classes // 2, 0.0 if kind == "fused" else 0.5  # these logits are rounded to 16 bits
    return arguments.change(head=torch.full((half, FEATURES), weight), vocab_sizes=(half, half)).result()


def _nearly_constant_head(rank, device, kind):
    """Return the results of shards whose features have the same differences in 16 bits."""
    arguments = Arguments(rank, device, kind, torch.bfloat16)
    half = arguments.classes // 2
    head = arguments.whole_head[half * rank : half * (rank + 1)] * 2.0**-12
    head[:, 0] = 1
    return arguments.change(head=head, vocab_sizes=(half, half)).result()


def _fsdp2(rank, device, kind):
    """Return the results if every rank has different rows."""
    torch.manual_seed(0)
    head = nn.Linear(FEATURES, 22, bias=False, device=device)
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    fully_shard(head, mesh=mesh)
    generator = torch.Generator().manual_seed(rank)
    input, target = torch.randn(ROWS, FEATURES, generator=generator), torch.randint(11, (ROWS,), generator=generator)
    target[0] = 21
    weight = head.weight.to_local() if kind == "local" else head.weight
    try:
        loss = F.linear_cross_entropy(input.to(device), weight, target.to(device), process_group=dist.group.WORLD)
        return [loss.item()]
    except ValueError as error:
        return f"ValueError: {error}"


HEADS = ("DTensor", "local")


def results(device, kind):
    """Run all cases as one of the processes."""
    rank = dist.get_rank()
    changes = {name: (given, change) for name, (given, change, _) in CASES.items()}
    if kind == "fused":
        changes |= {name: ({}, change) for name, change in NOT_FUSED.items()}
    cases = {
        f"{name}{', checked' * checks}": partial(_run, rank, device, kind, *change, checks)
        for checks in (False, True)
        for name, change in changes.items()
    }
    cases |= {f"head: {head}": partial(_fsdp2, rank, device, head) for head in HEADS}
    cases["agreeing"] = partial(_agreeing, rank, device, kind)
    cases["constant head"] = partial(_constant_head, rank, device, kind)
    cases["nearly constant head"] = partial(_nearly_constant_head, rank, device, kind)
    return results_of(cases.items())


def compiled(device):
    """Return the results of a compiled call whose targets differ, and of one whose targets agree."""
    found, call = [], torch.compile(F.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for change in (CASES["targets"][1], lambda _: {}):
        arguments = Arguments(dist.get_rank(), device)
        if arguments.rank == 1:
            arguments.change(**change(arguments))
        input, head = arguments.input.to(device).requires_grad_(), arguments.head.to(device).requires_grad_()
        loss = call(input, head, arguments.target.to(device), process_group=dist.group.WORLD, **arguments.options)
        loss.backward()
        found.append((loss.item(), input.grad.sum().item(), head.grad.sum().item()))
    return found


# With few classes, and with as many as CANN's operators need. Gloo transfers tensors through the CPU.
RUNS = {
    "cpu": ("cpu", "few classes", "gloo"),
    "npu": ("npu", "few classes", "hccl"),
    "fused": ("npu", "fused", "hccl"),
    "fused, gloo": ("npu", "fused", "gloo"),
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def processes(request):
    return request.param


@pytest.fixture(scope="module")
def found(processes):
    device, kind, backend = processes
    return run(results, 2, kind, device=device, backend=backend)


@pytest.fixture
def device(processes):
    return processes[0]


@pytest.fixture
def sentence(processes, name):
    return CASES[name][2].format(rows=sum(SIZES[processes[1]]))


def _assert_all_raise(found, name, sentence):
    for of_rank in found:
        assert of_rank[name].startswith(f"ValueError: linear_cross_entropy: {sentence}"), of_rank[name]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises_for_a_mismatch_if_values_are_readable(device, found, name, sentence):
    _assert_all_raise(found, name if device == "cpu" else f"{name}, checked", sentence)


@pytest.mark.parametrize("processes", [RUNS["fused"], RUNS["fused, gloo"]], ids=str, indirect=True)
@pytest.mark.parametrize("name", NOT_FUSED)
def test_every_rank_needs_the_same_operators(processes, found, name):
    _assert_all_raise(found, f"{name}, checked", f"whether CANN's operators compute the loss {SAME}")
    assert all(math.isnan(value) for of_rank in found for value in of_rank[name])


@pytest.mark.parametrize("name", CASES)
def test_all_results_are_nan_for_a_mismatch_if_values_are_not_readable(device, found, name, sentence):
    if device == "cpu" or name == "number of rows":  # found in the collective for vocab_sizes
        _assert_all_raise(found, name, sentence)
    else:
        assert all(math.isnan(value) for of_rank in found for value in of_rank[name])


def test_replicated_rows_may_differ_by_rounding(found):
    for of_rank in found:
        assert all(math.isfinite(value) for value in of_rank["agreeing"]), of_rank["agreeing"]


def test_equal_shards_of_a_constant_head_are_not_refused(processes, found):
    for of_rank in found:
        assert of_rank["constant head"][0] == pytest.approx(math.log(sum(SIZES[processes[1]])))


def test_different_shards_of_a_nearly_constant_head_are_not_refused(found):
    for of_rank in found:
        assert all(math.isfinite(value) for value in of_rank["nearly constant head"]), of_rank["nearly constant head"]


@pytest.mark.parametrize("head", HEADS)
def test_fsdp2_shards_raise_if_each_rank_has_its_own_rows(device, found, head):
    if device == "cpu":
        _assert_all_raise(found, f"head: {head}", f"target {SAME} different{OWN_ROWS}")
    else:
        assert all(math.isnan(of_rank[f"head: {head}"][0]) for of_rank in found)


@pytest.mark.skipif(not COMPILES_COLLECTIVES, reason="torch 2.11 drops the gradients, so the call raises")
def test_mismatched_compiled_calls_give_nan():
    for different, same in run(compiled, 2):
        assert all(map(math.isnan, different)) and all(map(math.isfinite, same))
