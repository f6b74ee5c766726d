"""A vocabulary sharded over two processes with NPUs: fused operators, one packed collective, the CPU's results."""

from functools import partial

import torch_aclnn_ops
from torch_aclnn_ops import functional as F

import host_npu
import pytest
import torch
import torch.distributed as dist
from host_npu.testing import results_of, run

from benchmarks._launches import count_launches

ROWS, FEATURES, CLASSES = 24, 16, 288
OUTPUTS = ("log_probabilities", "logsumexp", "z_loss")
# The number of classes of each rank, and options of the function.
CASES = {
    "fused": ((160, 128), {}),
    "fused, none": ((128, 160), {"reduction": "none"}),
    "fused, an ignore_index that is a class": ((160, 128), {"ignore_index": 200, "reduction": "sum"}),
    "fused, weights": ((160, 128), {"weight": torch.linspace(0.5, 2, 288), "token_weight": torch.linspace(1, 3, 24)}),
    "fused with a z-loss": ((128, 160), {"lse_square_scale": 0.1, "reduction": "sum"}),
    "fused, outputs": ((160, 128), {"lse_square_scale": 0.1, "outputs": OUTPUTS, "reduction": "none"}),
    "one shard too small for the operators": ((200, 88), {}),
    "label smoothing": ((160, 128), {"label_smoothing": 0.1}),
    "predicted tokens": ((160, 128), {"outputs": ("predicted_tokens",), "reduction": "none"}),
}


def _leaves(device, sizes, rank=None, rows=ROWS, ignored=-100):
    """Return an input, a head or this process's part of it, and targets of which one is ignored."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(rows, FEATURES, generator=generator).bfloat16()
    head = (0.2 * torch.randn(CLASSES, FEATURES, generator=generator)).bfloat16()
    target = torch.randint(CLASSES, (rows,), generator=generator).index_fill(0, torch.tensor([3]), ignored)
    head = head if rank is None else head.split(sizes)[rank]
    return *(one.to(device).requires_grad_() for one in (input, head)), target.to(device)


def _shared(sizes, rank):
    return {} if rank is None else {"process_group": dist.group.WORLD, "vocab_sizes": sizes}


def results_and_gradients(sizes, options, device, rank=None):
    """Return the results and the gradients of input and head; without a rank, those of the full head."""
    input, head, target = _leaves(device, sizes, rank, ignored=options.get("ignore_index", -100))
    options = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in options.items()}
    result = F.linear_cross_entropy(input, head, target, **options, **_shared(sizes, rank))
    found = [result] if isinstance(result, torch.Tensor) else [one for one in result if one is not None]
    total = found[0].sum()
    if "outputs" in options:
        # Some gradients of losses are 0, but then those of the log-sum-exp are not.
        factors = torch.arange(ROWS, device=device).remainder(3)
        differentiable = [one for one in found if one.requires_grad]
        total = sum((one * factors).sum() for one in differentiable) + differentiable[-1].square().sum()
    found += torch.autograd.grad(total, (input, head))
    assert all(tensor.device.type == device for tensor in found)
    return found


def second_derivative(device, rank=None):
    """Return the derivative of a function of the input's gradient."""
    input, head, target = _leaves(device, sizes := (160, 128), rank)
    options = {"reduction": "none", "lse_square_scale": 0.1}
    loss = F.linear_cross_entropy(input, head, target, **options, **_shared(sizes, rank))
    (gradient,) = torch.autograd.grad(loss.sum(), input, create_graph=True)
    return torch.autograd.grad(gradient.float().square().sum(), input)[0].float()


def _rows_that_are_ignored_or_absent(device, rank):
    """Return sums of losses and gradients if all rows are ignored, and if there are none."""
    found = []
    for rows in (4, 0):
        input, head, target = _leaves(device, sizes := (160, 128), rank, max(rows, 4))
        input, target = input[:rows], target[:rows].fill_(-100)
        loss = F.linear_cross_entropy(input, head, target, reduction="none", **_shared(sizes, rank))
        found += [loss, *torch.autograd.grad(loss.sum(), (input, head))]
    return [tensor.abs().sum().item() for tensor in found]


def _counted(sizes, options, device, rank):
    """Return the results, and the launches of this package's operators and of collectives."""
    before = torch_aclnn_ops.launches(), host_npu.stats().collectives
    found = results_and_gradients(sizes, options, device, rank)
    torch.npu.synchronize()
    after = torch_aclnn_ops.launches(), host_npu.stats().collectives
    return found, *(_difference(*counts) for counts in zip(before, after, strict=True))


def _difference(before, after):
    return {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}


def results(device):
    """Run all cases as one of the processes."""
    rank = dist.get_rank()
    cases = {name: partial(_counted, *case, device, rank) for name, case in CASES.items()}
    cases["second derivative"] = partial(second_derivative, device, rank)
    cases["no rows"] = partial(_rows_that_are_ignored_or_absent, device, rank)
    return results_of(cases.items())


def launches(device):
    """Return the number of operators that a call launches, forward and backward; 256 classes per process."""
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


# The processes and their counters are the host NPU's.
pytestmark = pytest.mark.simulator

FUSED = {
    "aclnnFusedLinearOnlineMaxSum": 1,
    "aclnnFusedCrossEntropyLossWithMaxSum": 1,
    "aclnnFusedLinearCrossEntropyLossGrad": 1,
}
LAUNCHES = {name: [FUSED, FUSED] for name in CASES if name.startswith("fused")}
LAUNCHES |= {"one shard too small for the operators": [FUSED, {}], "label smoothing": [{}, {}]}


# Gloo transfers tensors through the CPU.
@pytest.fixture(scope="module", params=["hccl", "gloo"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def found(backend):
    return run(results, 2, device="npu", backend=backend)


def _assert_close(found, expected):
    expected = expected.detach()
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < 2**-7
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-8 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_results_equal_those_of_one_process_on_a_cpu(found, name):
    expected = results_and_gradients(*CASES[name], "cpu")
    *of_ranks, heads = zip(*(of_rank[name][0] for of_rank in found), strict=True)
    for of_rank, one in zip(of_ranks, expected[:-1], strict=True):
        for result in of_rank:
            if one.is_floating_point():
                _assert_close(result, one)
            else:
                assert torch.equal(result, one)
    for loss in of_ranks[0]:  # the operators round logits to 16 bits
        torch.testing.assert_close(loss, expected[0], rtol=1e-4, atol=1e-4)
    _assert_close(torch.cat(heads), expected[-1])


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_fused_operators_are_launched_if_they_support_the_call(found, name):
    assert [of_rank[name][1] for of_rank in found] == LAUNCHES[name]


@pytest.mark.parametrize("name", CASES)
def test_the_forward_pass_has_one_collective_and_the_backward_pass_another(backend, found, name):
    expected = {"HcclAllGather": 1, "HcclAllReduce": 1} if backend == "hccl" else {}
    assert [of_rank[name][2] for of_rank in found] == [expected, expected]


def test_rows_that_are_ignored_or_absent_contribute_zero(found):
    assert [of_rank["no rows"] for of_rank in found] == [[0] * 6] * 2


def test_a_gradient_can_be_differentiated(found):
    for of_rank in found:
        _assert_close(of_rank["second derivative"], second_derivative("cpu"))


def test_a_vocab_parallel_loss_launches_what_ranks_exchange_and_compare_besides():
    for rank, found in enumerate(run(launches, 2, device="npu", backend="hccl")):
        for name, number in {"mean": 45, "sum": 42, "none": 41, "z-loss": 51}.items():
            # The first rank's classes start at 0, which need not be subtracted from targets.
            assert found[name].total() == number + (rank > 0), (name, found[name].total())
