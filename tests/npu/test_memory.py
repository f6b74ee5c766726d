"""Losses on a head use at most max_memory on an NPU, in addition to rows of the input's size."""

from torch_aclnn_ops import functional as F

import pytest
import torch

# A device's operators also have workspaces.
pytestmark = pytest.mark.simulator

ROWS, FEATURES, CLASSES = 512, 64, 4000
MAX_MEMORY = 2**22


def _head(dtype, requires_grad=True):
    torch.manual_seed(0)
    return [torch.randn(size, FEATURES).to("npu", dtype).requires_grad_(requires_grad) for size in (ROWS, CLASSES)]


def _cross_entropy(dtype, **options):
    input, head = _head(dtype)
    return F.linear_cross_entropy, (input, head, torch.randint(CLASSES, (ROWS,)).npu()), options


def _of_probabilities(dtype, **options):
    input, head = _head(dtype)
    return F.linear_cross_entropy, (input, head, torch.rand(ROWS, CLASSES).to("npu", dtype)), options


def _divergence(dtype, **options):
    return F.linear_kl_div, (*_head(dtype), *_head(dtype, False)), options


CALLS = {
    "cross entropy": (_cross_entropy, {}),
    "cross entropy of rows": (_cross_entropy, {"reduction": "none"}),
    "a softcap": (_cross_entropy, {"softcap": 30.0}),
    "the entropy": (_cross_entropy, {"outputs": ("entropy",), "softcap": 30.0}),
    "probabilities": (_of_probabilities, {"label_smoothing": 0.1}),
    "a divergence of rows": (_divergence, {"reduction": "none"}),
    **{name: (_divergence, {"divergence": name}) for name in ("forward_kl", "reverse_kl", "jensen_shannon")},
}


def _bytes(which):
    torch.npu.synchronize()
    return torch.npu.memory_stats()[f"requested_bytes.all.{which}"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "options"), CALLS.values(), ids=CALLS)
def test_a_loss_and_its_gradients_take_at_most_max_memory(make, options, dtype):
    function, arguments, options = make(dtype, **options)
    before = _bytes("current")
    torch.npu.reset_peak_memory_stats()
    result = function(*arguments, **options, max_memory=MAX_MEMORY)
    getattr(result, "loss", result).sum().backward()
    results = [one.grad for one in arguments[:2]]
    rows = 4 * results[0].nbytes
    assert _bytes("peak") - before - sum(one.nbytes for one in results) <= MAX_MEMORY + rows
