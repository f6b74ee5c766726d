"""Losses of half of a vocabulary on one of two processes with an NPU, for test_vocab_parallel.py."""

from functools import partial

import torch_aclnn_ops  # isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops import functional as F

import host_npu
import torch
import torch.distributed as dist
from host_npu.testing import results_of

from benchmarks._launches import count_launches

ROWS, FEATURES, CLASSES = 24, 16, 288
# Number of classes of each rank, and options of the function.
CASES = {
    "fused": ((160, 128), {}),
    "fused, none": ((128, 160), {"reduction": "none"}),
    "fused, an ignore_index that is a class": ((160, 128), {"ignore_index": 200, "reduction": "sum"}),
    "fused, weights": ((160, 128), {"weight": torch.linspace(0.5, 2, 288), "token_weight": torch.linspace(1, 3, 24)}),
    "fused with a z-loss": ((128, 160), {"lse_square_scale": 0.1, "reduction": "sum"}),
    "one shard too small for the operators": ((200, 88), {}),
    "label smoothing": ((160, 128), {"label_smoothing": 0.1}),
}


def gradients(sizes, options, device, rank=None):
    """Return the loss and the gradients of input and head; without a rank, those of the full head."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(ROWS, FEATURES, generator=generator).bfloat16()
    weight = (0.2 * torch.randn(CLASSES, FEATURES, generator=generator)).bfloat16()
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[3] = options.get("ignore_index", -100)
    options = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in options.items()}
    if rank is not None:
        weight = weight.split(sizes)[rank]
        options = {"process_group": dist.group.WORLD, "vocab_sizes": sizes, **options}
    input, weight = (tensor.to(device).requires_grad_() for tensor in (input, weight))
    loss = F.linear_cross_entropy(input, weight, target.to(device), **options)
    found = (loss, *torch.autograd.grad(loss.sum(), (input, weight)))
    assert all(tensor.device.type == device for tensor in found)
    return found


def _counted(sizes, options, device):
    """Return the gradients, and how often which operators of this package and which collectives were launched."""
    before = torch_aclnn_ops.launches(), host_npu.stats().collectives
    found = gradients(sizes, options, device, dist.get_rank())
    torch.npu.synchronize()
    after = torch_aclnn_ops.launches(), host_npu.stats().collectives
    return found, *(_difference(*counts) for counts in zip(before, after, strict=True))


def _difference(before, after):
    return {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}


def results(device):
    """Run all cases as one of the processes."""
    return results_of((name, partial(_counted, *case, device)) for name, case in CASES.items())


def _leaves(device, rows=24, sizes=(160, 128)):
    """Return an input, this process's half of a head, and targets of which one is ignored."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(rows, FEATURES, generator=generator).bfloat16()
    head = (0.2 * torch.randn(CLASSES, FEATURES, generator=generator)).bfloat16()
    target = torch.randint(CLASSES, (rows,), generator=generator)
    target[1:2] = -100
    whole = input.clone().requires_grad_(), head.requires_grad_(), target
    shard = head.detach().split(sizes)[dist.get_rank()].to(device).requires_grad_()
    return whole, (input.to(device).requires_grad_(), shard, target.to(device))


_SHARED = {"vocab_sizes": (160, 128), "reduction": "none"}


def rows_that_are_ignored_or_absent(device):
    """Losses and gradients where all rows are ignored, and where there are none."""
    found = []
    for rows in (2, 0):
        _, (input, head, target) = _leaves(device, rows)
        target.fill_(-100)
        loss = F.linear_cross_entropy(input, head, target, process_group=dist.group.WORLD, **_SHARED)
        found += [loss, *torch.autograd.grad(loss.sum(), (input, head))]
    return [tensor.abs().sum().item() for tensor in found]


def outputs(device):
    """All results and the gradients of a function of them, and those of one process."""
    found = []
    options = {"lse_square_scale": 0.1, "outputs": ("log_probabilities", "logsumexp", "z_loss"), "reduction": "none"}
    for (input, head, target), shared in zip(_leaves(device), ({}, {"process_group": dist.group.WORLD}), strict=True):
        sizes = {"vocab_sizes": _SHARED["vocab_sizes"]} if shared else {}
        results = [
            one for one in F.linear_cross_entropy(input, head, target, **options, **shared, **sizes) if one is not None
        ]
        # Some gradients of losses are 0, and then those of the log-sum-exp are not.
        factors = torch.arange(len(target)).remainder(3).to(input.device)
        total = sum((one * factors).sum() for one in results[:-1]) + results[-1].square().sum()
        found.append([one.float().cpu() for one in (*results, *torch.autograd.grad(total, (input, head)))])
    whole, shard = found
    whole[-1] = whole[-1].split(_SHARED["vocab_sizes"])[dist.get_rank()]
    return whole, shard


def second_derivative(device):
    """The derivative of a function of the gradient of the input, and that of one process."""
    found = []
    for (input, head, target), options in zip(
        _leaves(device), ({"reduction": "none"}, {"process_group": dist.group.WORLD, **_SHARED}), strict=True
    ):
        loss = F.linear_cross_entropy(input, head, target, **options)
        (gradient,) = torch.autograd.grad(loss.sum(), input, create_graph=True)
        found += torch.autograd.grad(gradient.float().square().sum(), input)
    return [tensor.float().cpu() for tensor in found]


OPTIONS_OF_ONE = {
    "zero_if_all_ignored": {"zero_if_all_ignored": True},
    "softcap": {"softcap": 30.0},
    "chunk_size": {"chunk_size": 8},
}


def disagreement(device, what, checks_values):
    """The loss of every row and the gradients, or what is raised, where the second process's argument differs."""
    _, (input, head, target) = _leaves(device)
    options = dict(_SHARED)
    if dist.get_rank() == 1:
        if what == "target":
            target[0] = (target[0] + 1) % CLASSES
        elif what == "an ignored row":
            target[0] = -100
        elif what == "input":
            input = (input.detach() + 1).requires_grad_()
        elif what == "a bias":
            options["linear_bias"] = torch.zeros(len(head), dtype=head.dtype, device=device)
        else:
            options |= OPTIONS_OF_ONE.get(what, {})
    if what == "the whole head":  # of both
        options["vocab_sizes"] = (CLASSES, CLASSES)
        head = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1)).bfloat16()
        head = head.to(device).requires_grad_()
    torch_aclnn_ops.check_values(checks_values)
    try:
        loss = F.linear_cross_entropy(input, head, target, process_group=dist.group.WORLD, **options)
        return [loss.cpu(), *(one.float().cpu() for one in torch.autograd.grad(loss.sum(), (input, head)))]
    except ValueError as error:
        return str(error)
    finally:
        torch_aclnn_ops.check_values(False)


def heads_of_zeros(device):
    """The losses of a head whose shards are the same, because all its weights are 0."""
    _, (input, _, target) = _leaves(device)
    head = torch.zeros(CLASSES // 2, FEATURES, dtype=torch.bfloat16, device=device)
    options = {**_SHARED, "vocab_sizes": (CLASSES // 2, CLASSES // 2), "process_group": dist.group.WORLD}
    return F.linear_cross_entropy(input.detach(), head, target, **options).tolist()


def launches(device):
    """How many operators a call launches, forward and backward; 256 classes for each process."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(64, 32, generator=generator).bfloat16().to(device).requires_grad_()
    head = (0.2 * torch.randn(512, 32, generator=generator)).bfloat16().chunk(2)[dist.get_rank()]
    head = head.to(device).requires_grad_()
    target = torch.randint(512, (64,), generator=generator).to(device)
    options = {"process_group": dist.group.WORLD, "vocab_sizes": (256, 256)}

    def call(more):
        loss = F.linear_cross_entropy(input, head, target, **more, **options)
        torch.autograd.grad(loss, (input, head), torch.ones_like(loss))

    calls = {
        "mean": {},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        "z-loss": {"lse_square_scale": 0.1},
    }
    return {name: count_launches(partial(call, more)) for name, more in calls.items()}


def predicted_tokens(device):
    """The predicted tokens, and the gradients of the losses that are returned with them; and those of one process."""
    found = []
    options = {"outputs": ("predicted_tokens",), "reduction": "none"}
    for leaves, group in zip(_leaves(device), (None, dist.group.WORLD), strict=True):
        shared = {} if group is None else {"process_group": group, "vocab_sizes": _SHARED["vocab_sizes"]}
        result = F.linear_cross_entropy(*leaves, **options, **shared)
        gradients = torch.autograd.grad(result.loss.sum(), leaves[:2])
        found.append([one.float().cpu() for one in (result.predicted_tokens, *gradients)])
    whole, shard = found
    whole[-1] = whole[-1].split(_SHARED["vocab_sizes"])[dist.get_rank()]
    return whole, shard
