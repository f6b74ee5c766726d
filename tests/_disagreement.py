"""Calls of two processes that share a vocabulary and do not agree, for test_vocab_parallel_agreement.py."""

from functools import partial

import torch_aclnn_ops  # isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops import functional as F

import torch
import torch.distributed as dist
from host_npu.testing import results_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

ROWS, FEATURES, SIZES = 6, 8, (12, 10)
CLASSES = sum(SIZES)
OWN_ROWS = "; if every rank has its own rows, as with FSDP2, pass fsdp_module instead of process_group"
SAME = "must be the same on every rank of process_group, but on this one it is"
SAME_HEAD = (
    "linear_weight must be this rank's shard of the head, but it is the same on every rank of process_group, with 22"
    " rows; pass head.chunk(world_size)[rank]"
)


class Arguments:
    """The arguments of a rank, and how many weights are trained."""

    def __init__(self, rank, device, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        input, head = (torch.randn(n, FEATURES, generator=generator) for n in (ROWS, CLASSES))
        self.rank, self.device, self.dtype = rank, device, dtype
        self.input, self.head, self.whole_head = input, head.split(SIZES)[rank].clone(), head
        self.target = torch.randint(CLASSES, (ROWS,), generator=generator)
        self.target[0] = 4
        self.options = {"vocab_sizes": SIZES}
        self.is_trained = self.runs_backward = True

    def change(self, **values):
        """Set attributes, or else options; an option that is ``...`` is not given."""
        for name, value in values.items():
            if hasattr(self, name):
                setattr(self, name, value)
            else:
                self.options[name] = value
        self.options = {name: value for name, value in self.options.items() if value is not ...}
        return self

    def result(self):
        """Return the loss, the gradients and what is raised."""
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
# Only one rank would add up gradients.
FORWARD = {"runs_backward": False}


def _third(target, value):
    return target.index_fill(0, torch.tensor([3]), value)


# What is found in values: what all ranks are given, how rank 1 changes that, and the argument that the error names.
DIFFERENT_VALUES = {
    "inputs": ({}, lambda one: {"input": one.input + 1}, "input"),
    "last row": ({}, lambda one: {"input": one.input + torch.eye(ROWS)[-1:].T}, "input"),
    "targets": ({}, lambda one: {"target": _third(one.target, int(one.target[3] + 1) % CLASSES)}, "target"),
    "order of targets": ({"target": ORDERED}, lambda one: {"target": one.target.flip(0)}, "target"),
    "ignored row": ({}, lambda one: {"target": _third(one.target, -100)}, "target"),
    "a target outside": ({}, lambda one: {"target": _third(one.target, CLASSES)}, "target"),
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


# What all ranks are given, how rank 1 changes that, and how every rank's error begins.
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
        lambda one: {"target": torch.nn.functional.one_hot(one.target, CLASSES).float()},
        f"whether target has probabilities {SAME}",
    ),
    "frozen input": (
        FORWARD,
        lambda _: {"is_trained": False},
        f"whether input needs a gradient {SAME}",
    ),
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
        lambda one, sizes=sizes: {"head": one.whole_head, "vocab_sizes": sizes},
        lambda _: {},
        SAME_HEAD,
    )
    for suffix, sizes in {"": (CLASSES, CLASSES), " without vocab_sizes": ...}.items()
}


def _run(rank, device, given, change, checks_values=False):
    arguments = Arguments(rank, device)
    arguments.change(**(given(arguments) if callable(given) else given))
    if rank == 1:
        arguments.change(**change(arguments))
    torch_aclnn_ops.check_values(checks_values)
    try:
        return arguments.result()
    finally:
        torch_aclnn_ops.check_values(False)


def _agreeing(rank, device):
    """Return the results where nothing differs but the last bits of the input."""
    arguments = Arguments(rank, device, torch.bfloat16)
    return arguments.change(input=arguments.input * (1 + 2.0**-7 * (rank == 1))).result()


def _constant_head(rank, device):
    """Return the results of shards that are the same, because all weights are."""
    half = CLASSES // 2
    return Arguments(rank, device).change(head=torch.full((half, FEATURES), 0.5), vocab_sizes=(half, half)).result()


def _fsdp2(rank, device, make_head):
    """Return the results if every rank has different rows."""
    torch.manual_seed(0)
    head = nn.Linear(FEATURES, CLASSES, bias=False, device=device)
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    fully_shard(head, mesh=mesh)
    generator = torch.Generator().manual_seed(rank)
    input, target = torch.randn(ROWS, FEATURES, generator=generator), torch.randint(11, (ROWS,), generator=generator)
    target[0] = CLASSES - 1
    weight, options = make_head(head.weight)
    try:
        loss = F.linear_cross_entropy(input.to(device), weight, target.to(device), **options)
        return [loss.item()]
    except (ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


HEADS = {
    "DTensor": lambda weight: (weight, {"process_group": dist.group.WORLD}),
    "local": lambda weight: (weight.to_local(), {"process_group": dist.group.WORLD}),
    "local alone": lambda weight: (weight.to_local(), {}),
    "detached local alone": lambda weight: (weight.detach().to_local(), {}),
}


def results(device):
    """Run all cases as one of the processes."""
    rank = dist.get_rank()
    cases = {
        f"{name}{', checked' * checks}": partial(_run, rank, device, given, change, checks)
        for checks in (False, True)
        for name, (given, change, _) in CASES.items()
    }
    cases |= {f"head: {name}": lambda make=make: _fsdp2(rank, device, make) for name, make in HEADS.items()}
    cases["agreeing"] = lambda: _agreeing(rank, device)
    cases["constant head"] = lambda: _constant_head(rank, device)
    return results_of(cases.items())


def compiled(device):
    """Return the results of a compiled call whose targets differ, and of one whose do not."""
    found = []
    for change in (CASES["targets"][1], lambda _: {}):
        arguments = Arguments(dist.get_rank(), device)
        if arguments.rank == 1:
            arguments.change(**change(arguments))
        call = torch.compile(F.linear_cross_entropy, backend="aot_eager", fullgraph=True)
        input, head = arguments.input.to(device).requires_grad_(), arguments.head.to(device).requires_grad_()
        loss = call(input, head, arguments.target.to(device), process_group=dist.group.WORLD, vocab_sizes=SIZES)
        loss.backward()
        found.append((loss.item(), input.grad.sum().item(), head.grad.sum().item()))
    return found
