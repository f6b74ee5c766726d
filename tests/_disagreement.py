"""Calls of two processes that share a vocabulary and do not agree, for test_vocab_parallel_agreement.py."""

import torch_aclnn_ops  # isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops import functional as F

import torch
import torch.distributed as dist
from host_npu.testing import results_of
from torch import nn
from torch.distributed.fsdp import fully_shard

ROWS, FEATURES, SIZES = 6, 8, (12, 10)
CLASSES = sum(SIZES)
OWN_ROWS = "; if every rank has its own rows, as with FSDP2, pass fsdp_module instead of process_group"
SAME = "must be the same on every rank of process_group, but it is"
SAME_HEAD = (
    "linear_weight must be this rank's shard of the head, but it is the same on every rank of process_group, with 22"
    " rows; pass head.chunk(world_size)[rank]"
)
VALUES = "values"  # what is found in values, which are read on a CPU, and on an NPU where values are checked
MESSAGES = "messages"  # what is found in the collective for vocab_sizes


class Arguments:
    """The arguments of a rank; those of rank 1 are changed by the cases."""

    def __init__(self, rank, device, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        input, head = (torch.randn(n, FEATURES, generator=generator) for n in (ROWS, CLASSES))
        self.is_other = rank == 1
        self.input, self.head, self.whole_head = input, head.split(SIZES)[rank].clone(), head
        self.target = torch.randint(CLASSES, (ROWS,), generator=generator)
        self.options = {"vocab_sizes": SIZES}
        self.device, self.dtype = device, dtype
        self.is_trained = self.runs_backward = True

    def result(self):
        """Return the loss, the gradients and what is raised."""
        input, head = (tensor.to(self.dtype).to(self.device) for tensor in (self.input, self.head))
        input.requires_grad_(self.is_trained)
        head.requires_grad_()
        options = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in self.options.items()
        }
        try:
            target = self.target.to(self.device)
            loss = F.linear_cross_entropy(input, head, target, process_group=dist.group.WORLD, **options)
            found = torch.autograd.grad(loss.sum(), (input, head)) if self.runs_backward else ()
        except (ValueError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        return [loss.sum().item(), *(gradient.double().cpu().sum().item() for gradient in found)]


def option(name, value, other):
    """Return a change of an option that all ranks give."""

    def change(arguments):
        arguments.options[name] = other if arguments.is_other else value

    return change


def _inputs(arguments):
    arguments.input = arguments.input + arguments.is_other


def _one_row(arguments):
    arguments.input[ROWS - 1] += arguments.is_other


def _targets(arguments):
    arguments.target[3] = (arguments.target[3] + arguments.is_other) % CLASSES


def _order_of_targets(arguments):
    arguments.target = torch.arange(ROWS).flip(0) if arguments.is_other else torch.arange(ROWS)


def _ignored(arguments):
    arguments.target[3] = -100 if arguments.is_other else arguments.target[3]


def _target_outside(arguments):
    arguments.target[3] = CLASSES if arguments.is_other else arguments.target[3]


def _probabilities(arguments):
    arguments.target = torch.full((ROWS, CLASSES), 1 / CLASSES)
    arguments.target[0, 0] += arguments.is_other


def _kind_of_target(arguments):
    if arguments.is_other:
        arguments.target = torch.nn.functional.one_hot(arguments.target, CLASSES).float()


def _width(arguments):
    if arguments.is_other:
        arguments.head = arguments.head[:-1]


def _sizes(arguments):
    if arguments.is_other:
        arguments.options["vocab_sizes"] = (14, 10)


def _frozen_input(arguments):
    arguments.is_trained = not arguments.is_other
    arguments.runs_backward = False  # of the loss of nan, in which only one rank would add up gradients


def _reduce_input_grad(arguments):
    arguments.options["reduce_input_grad"] = not arguments.is_other
    arguments.runs_backward = False  # in which only one rank would add up gradients


def _rows(arguments):
    _without_sizes(arguments)
    if arguments.is_other:
        arguments.input, arguments.target = arguments.input[:4], arguments.target[:4]


def _without_sizes(arguments):
    arguments.options.pop("vocab_sizes")


def _smoothing_without_sizes(arguments):
    arguments.options = {"label_smoothing": 0.1} if arguments.is_other else {}


def _targets_without_sizes(arguments):
    _without_sizes(arguments)
    _targets(arguments)


def _whole_head(arguments):
    arguments.head, arguments.options["vocab_sizes"] = arguments.whole_head, (CLASSES, CLASSES)


def _whole_head_without_sizes(arguments):
    arguments.head = arguments.whole_head
    _without_sizes(arguments)


# What rank 1 does otherwise, where it is found, and what every rank raises.
CASES = {
    "inputs": (_inputs, VALUES, f"input {SAME} not{OWN_ROWS}"),
    "last row": (_one_row, VALUES, f"input {SAME} not{OWN_ROWS}"),
    "targets": (_targets, VALUES, f"target {SAME} not{OWN_ROWS}"),
    "order of targets": (_order_of_targets, VALUES, f"target {SAME} not{OWN_ROWS}"),
    "ignored row": (_ignored, VALUES, f"target {SAME} not{OWN_ROWS}"),
    "a target outside": (_target_outside, VALUES, f"target {SAME} not{OWN_ROWS}"),
    "probabilities": (_probabilities, VALUES, f"target {SAME} not{OWN_ROWS}"),
    "kind of target": (
        _kind_of_target,
        VALUES,
        "whether target has probabilities must be the same on every rank of process_group, but it is False on rank 0"
        " and True on rank 1",
    ),
    "rows of the head": (
        _width,
        VALUES,
        "vocab_sizes must have linear_weight's 9 rows at rank 1, but it has 10: vocab_sizes is (12, 10)",
    ),
    "vocab_sizes": (_sizes, VALUES, f"vocab_sizes {SAME} not"),
    "frozen input": (
        _frozen_input,
        VALUES,
        f"whether input needs a gradient {SAME} True on rank 0 and False on rank 1",
    ),
    "reduce_input_grad": (
        _reduce_input_grad,
        VALUES,
        f"reduce_input_grad {SAME} True on rank 0 and False on rank 1",
    ),
    "zero_if_all_ignored": (
        option("zero_if_all_ignored", False, True),
        VALUES,
        f"zero_if_all_ignored {SAME} False on rank 0 and True on rank 1",
    ),
    "a token_weight on one rank": (
        option("token_weight", None, torch.ones(ROWS)),
        VALUES,
        f"whether token_weight is given {SAME} False on rank 0 and True on rank 1",
    ),
    "token_weight": (
        option("token_weight", torch.ones(ROWS), torch.arange(1.0, ROWS + 1)),
        VALUES,
        f"token_weight {SAME} not",
    ),
    "order of token_weight": (
        option("token_weight", torch.arange(1.0, ROWS + 1), torch.arange(1.0, ROWS + 1).flip(0)),
        VALUES,
        f"token_weight {SAME} not",
    ),
    "weight": (option("weight", torch.ones(CLASSES), 1e-6 * torch.ones(CLASSES)), VALUES, f"weight {SAME} not"),
    "reduction": (option("reduction", "sum", "mean"), VALUES, f"reduction {SAME} 'sum' on rank 0 and 'mean' on rank 1"),
    "softcap": (option("softcap", None, 2.0), VALUES, f"softcap {SAME} None on rank 0 and 2.0 on rank 1"),
    "temperature": (option("temperature", 1.0, 0.5), VALUES, f"temperature {SAME} 1.0 on rank 0 and 0.5 on rank 1"),
    "label_smoothing": (
        option("label_smoothing", 0.1, 0.2),
        VALUES,
        f"label_smoothing {SAME} 0.1 on rank 0 and 0.2 on rank 1",
    ),
    "z-loss": (
        option("lse_square_scale", 0.0, 0.5),
        VALUES,
        f"lse_square_scale {SAME} 0.0 on rank 0 and 0.5 on rank 1",
    ),
    "ignore_index": (option("ignore_index", 4, -100), VALUES, f"target {SAME} not{OWN_ROWS}"),
    "number of rows": (_rows, MESSAGES, f"the number of rows of input {SAME} 6 on rank 0 and 4 on rank 1{OWN_ROWS}"),
    "label smoothing without vocab_sizes": (
        _smoothing_without_sizes,
        MESSAGES,
        f"whether label_smoothing is above 0 {SAME} False on rank 0 and True on rank 1",
    ),
    "targets without vocab_sizes": (_targets_without_sizes, VALUES, f"target {SAME} not{OWN_ROWS}"),
    "the whole head": (_whole_head, VALUES, SAME_HEAD),
    "the whole head without vocab_sizes": (_whole_head_without_sizes, VALUES, SAME_HEAD),
}


def _run(change, rank, device, checks_values=False):
    arguments = Arguments(rank, device)
    arguments.target[0] = 4
    change(arguments)
    torch_aclnn_ops.check_values(checks_values)
    try:
        return arguments.result()
    finally:
        torch_aclnn_ops.check_values(False)


def _agreeing(rank, device):
    """Return the results where nothing differs but the last bits of the input."""
    arguments = Arguments(rank, device, torch.bfloat16)
    arguments.input = arguments.input * (1 + 2.0**-7 * arguments.is_other)
    return arguments.result()


def _constant_head(rank, device):
    """Return the results of shards that are the same, because all weights are."""
    arguments = Arguments(rank, device)
    arguments.head, arguments.options["vocab_sizes"] = torch.full((CLASSES // 2, FEATURES), 0.5), (CLASSES // 2,) * 2
    return arguments.result()


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
    cases = {name: lambda change=change: _run(change, rank, device) for name, (change, *_) in CASES.items()}
    cases |= {
        f"{name}, checked": lambda change=change: _run(change, rank, device, True)
        for name, (change, *_) in CASES.items()
    }
    cases |= {f"head: {name}": lambda make=make: _fsdp2(rank, device, make) for name, make in HEADS.items()}
    cases["agreeing"] = lambda: _agreeing(rank, device)
    cases["constant head"] = lambda: _constant_head(rank, device)
    return results_of(cases.items())


def compiled(device):
    """Return the results of a compiled call whose targets differ, and of one whose do not."""
    found = []
    for change in (_targets, lambda _: None):
        arguments = Arguments(dist.get_rank(), device)
        change(arguments)
        call = torch.compile(F.linear_cross_entropy, backend="aot_eager", fullgraph=True)
        input, head = arguments.input.to(device).requires_grad_(), arguments.head.to(device).requires_grad_()
        loss = call(input, head, arguments.target.to(device), process_group=dist.group.WORLD, vocab_sizes=SIZES)
        loss.backward()
        found.append((loss.item(), input.grad.sum().item(), head.grad.sum().item()))
    return found
