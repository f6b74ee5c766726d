"""torch_npu's CrossEntropyLoss on the host NPU, against torch's in float64, forward and backward."""

import pytest
import torch
import torch_npu
from tests._values import DTYPES, assert_near, called

_ROWS, _COLUMNS = 12, 33


@DTYPES
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_is_that_of_float64(smoothing, reduction, weighted, dtype):
    x = torch.randn(_ROWS, _COLUMNS).to(dtype)
    target = torch.randint(_COLUMNS, (_ROWS,)).index_fill(0, torch.tensor([2, 5]), -100)
    weight = torch.rand(_COLUMNS) + 0.5 if weighted else None
    on_npu, reference = x.npu().requires_grad_(), x.double().requires_grad_()
    loss, log_prob, *_ = called(
        torch_npu.npu_cross_entropy_loss, on_npu, target, weight, reduction=reduction, label_smoothing=smoothing
    )
    wide = None if weight is None else weight.double()
    expected = torch.nn.functional.cross_entropy(
        reference, target, wide, reduction=reduction, label_smoothing=smoothing
    )
    upstream = torch.randn(expected.shape).to(dtype)
    loss.reshape(expected.shape).backward(upstream.npu())
    expected.backward(upstream.double())
    for actual, wanted, units in (
        (loss.reshape(expected.shape), expected, 1),
        (log_prob, reference.log_softmax(-1), 1),
        # The gradient uses the rounded logarithms, whose error near 5 is half a unit of 4.
        (on_npu.grad, reference.grad, 6),
    ):
        assert_near(actual, wanted, units, dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.5}, "labelSmoothing is 1.5 instead of a number from 0 to 1"),
        ({"lse_square_scale_for_zloss": 0.1, "return_zloss": True}, "CANN does not support zloss"),
        ({"reduction": "most"}, "the reduction is most instead of mean, sum or none"),
    ],
    ids=str,
)
def test_other_options_are_refused_at_the_call(options, message):
    with pytest.raises(RuntimeError, match=message):
        torch_npu.npu_cross_entropy_loss(torch.randn(4, 8).npu(), torch.arange(4).npu(), **options)
