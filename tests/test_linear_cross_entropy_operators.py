"""The three raw operators of the linear cross entropy."""

from functools import partial
from typing import Any

from torch_aclnn_ops import ops
from torch_aclnn_ops.ops.linear_cross_entropy import pack_mask, unpack_mask

import pytest
import torch
from torch import Tensor

from tests._contract import HALF_DTYPES, Maker
from tests._raw_operator import ErrorInput, RawOperatorContract, Sample, error_inputs

ROWS, FEATURES, CLASSES = 11, 3, 5


def _shard(make, rows=ROWS):
    return make.normal(rows, FEATURES), make.normal(CLASSES, FEATURES), make.index(CLASSES, rows)


def _softmax_of_128_classes(make: Maker) -> tuple[Any, ...]:
    input, weight, target = make.normal(11, 3), make.normal(128, 3), make.index(128, 11)
    maximum, total, _, mask, masked, logits = ops.fused_linear_online_max_sum(input, weight, target, 16, 112, True)
    _, softmax = ops.fused_cross_entropy_loss_with_max_sum(maximum, total, maximum, logits)
    return make.normal(11).to(softmax.dtype), input, weight, mask, masked, None, None, softmax


class TestOnlineMaxSum(RawOperatorContract):
    CANN_DTYPES = HALF_DTYPES
    OPERATOR = ops.fused_linear_online_max_sum
    SAMPLES = [
        Sample("whole vocabulary", lambda make: (*_shard(make), 0, CLASSES, False), (0, 1)),
        Sample("with logits", lambda make: (*_shard(make), 0, CLASSES, True), (0, 1)),
        Sample("targets outside the shard", lambda make: (*_shard(make), 2, 4, True), (0, 1)),
        Sample("a later shard", lambda make: (make.normal(9, 3), make.normal(5, 3), make.index(12, 9), 7, 12, False)),
        Sample("an empty range", lambda make: (*_shard(make), 3, 3, False)),
        Sample("8 rows", lambda make: (*_shard(make, 8), 0, CLASSES, False)),
        Sample("no rows", lambda make: (*_shard(make, 0), 0, CLASSES, True)),
        Sample("no features", lambda make: (make.normal(4, 0), make.normal(5, 0), make.index(5, 4), 0, 5, True)),
        Sample("32-bit targets", lambda make: (*_shard(make)[:2], make.index(5, ROWS).int(), 1, 4, False)),
        Sample(
            "not contiguous",
            lambda make: (make.normal(3, 6).T, make.normal(5, 6)[:, ::2], make.index(5, 6, 2)[:, 1], 0, 5, True),
        ),
    ]
    ERROR_INPUTS = error_inputs(
        lambda make: (make.normal(4, 3), make.normal(5, 3), make.index(5, 4), 0, 5),
        {
            "integers": (0, Tensor.long, TypeError, "input must have a floating-point dtype, but it has torch.int"),
            "dtype of weight": (1, Tensor.half, TypeError, "weight must have dtype torch.float32 as input has, but it"),
            "target": (2, Tensor.short, TypeError, "target must have dtype torch.int64 or torch.int32, but it has"),
            "rank of input": (0, lambda x: x[None], ValueError, r"input must have 2 dimensions, .* \[1, 4, 3\]"),
            "no rows": (1, lambda w: w[:0], ValueError, r"weight must have at least 1 row, but its shape is \[0, 3\]"),
            "features": (1, lambda w: w[:, 1:], ValueError, r"weight must have shape \[V, H\] = \[5, 3\], .* \[5, 2\]"),
            "length of target": (2, lambda t: t[1:], ValueError, r"target must have shape \[BT\] = \[4\], .* \[3\]"),
            "negative start": (3, lambda _: -1, ValueError, "vocab_start_index must be at least 0, but it is -1"),
            "end before start": (4, lambda _: -1, ValueError, "vocab_end_index must be at least vocab_start_index = 0"),
        },
    ) + [
        ErrorInput(
            "target between the rows of weight and the end",
            lambda make: (make.normal(1, 3), make.normal(5, 3), torch.tensor([5]), 0, 7),
            IndexError,
            r"target must not be from 5 \(vocab_start_index \+ rows of weight\) to 6 \(vocab_end_index - 1\),"
            " but one is 5",
        )
    ]


def _statistics(make, *shape):
    return make.normal(*shape), make.probability(*shape) + 1, make.normal(*shape)


def _wide(function):
    """Create the arguments in float32 for 16-bit dtypes: the statistics are never narrower."""
    return lambda make: function(Maker(make.dtype if make.dtype == torch.float64 else torch.float32))


class TestLossWithMaxSum(RawOperatorContract):
    OPERATOR = ops.fused_cross_entropy_loss_with_max_sum
    SAMPLES = [
        Sample("loss alone", _wide(lambda make: (*_statistics(make, 6), None)), (0, 1, 2)),
        Sample("with softmax", _wide(lambda make: (*_statistics(make, 6), make.normal(6, 4))), (0, 1, 2, 3)),
        Sample("16-bit logits", _wide(lambda make: (*_statistics(make, 6), make.normal(6, 4).bfloat16())), (1, 2)),
        Sample("transposed logits", _wide(lambda make: (*_statistics(make, 6), make.normal(4, 6).T))),
        Sample("no rows", _wide(lambda make: (*_statistics(make, 0), make.normal(0, 4)))),
    ]
    ERROR_INPUTS = error_inputs(
        lambda make: (*_statistics(make, 3), make.normal(3, 2)),
        {
            "16-bit maximum": (0, Tensor.half, TypeError, "logits_max must have dtype torch.float32 or torch.float64"),
            "dtypes": (1, Tensor.double, TypeError, "sum_exp_logits must have dtype torch.float32 as logits_max has"),
            "rank": (0, lambda x: x[None], ValueError, r"logits_max must have 1 dimensions, but its shape is \[1, 3\]"),
            "size": (2, lambda x: x[1:], ValueError, r"predicted_logits must have shape \[BT\] = \[3\], but .* \[2\]"),
            "integers": (3, Tensor.long, TypeError, "logits must have a floating-point dtype, but it has torch.int64"),
            "rows": (3, lambda x: x[1:], ValueError, r"logits must have shape \[BT, V\] = \[3, 2\], .* \[2, 2\]"),
        },
    )


def _grad_arguments(make, *, softmax=False, rows=ROWS, boolean=False, targets=torch.int64):
    input, weight, target = _shard(make, rows)
    logits = input.to(_wide_dtype(make)) @ weight.to(_wide_dtype(make)).T
    mask = make.index(2, rows).bool()
    packed = pack_mask(torch.nn.functional.pad(mask, (0, -rows % 8)))
    grad = make.normal(rows).to(logits.dtype)
    tensors = grad, input, weight, mask if boolean else packed, target.to(targets)
    if softmax:
        return *tensors, None, None, logits.softmax(1)
    return *tensors, logits.amax(1), (logits - logits.amax(1, keepdim=True)).exp().sum(1), None


def _wide_dtype(make):
    return torch.float64 if make.dtype == torch.float64 else torch.float32


def _square(make):
    input, weight = make.normal(5, 5), make.normal(5, 5)
    return make.normal(5), input, weight, make.index(2, 5).bool(), make.index(5, 5), None, None, weight


class TestLossGrad(RawOperatorContract):
    CANN_DTYPES = HALF_DTYPES
    CANN_SAMPLES = (Sample("softmax of 128 classes", _softmax_of_128_classes),)

    @staticmethod
    def fits_cann(*arguments: Any) -> bool:
        softmax = arguments[-1]
        return not isinstance(softmax, torch.Tensor) or softmax.dim() != 2 or softmax.shape[1] >= 128

    OPERATOR = ops.fused_linear_cross_entropy_loss_grad
    ROUNDINGS = 16.0
    SAMPLES = [
        Sample("memory friendly", _grad_arguments),
        Sample("boolean mask", lambda make: _grad_arguments(make, boolean=True)),
        Sample("32-bit targets", lambda make: _grad_arguments(make, targets=torch.int32)),
        Sample("no rows", lambda make: _grad_arguments(make, rows=0)),
        Sample("given softmax", lambda make: _grad_arguments(make, softmax=True)),
    ]
    ERROR_INPUTS = error_inputs(
        _grad_arguments,
        {
            "no maximum": (5, lambda _: None, ValueError, "logits_max must be given when softmax is None, but it is"),
            "no sum": (6, lambda _: None, ValueError, "sum_exp_logits must be given when softmax is None, but it is"),
            "16 bits": (0, Tensor.half, TypeError, "grad must have dtype torch.float32 for an input of torch.float"),
            "dtype of weight": (2, Tensor.double, TypeError, "weight must have dtype torch.float32 as input has, but"),
            "dtype of the mask": (3, Tensor.int, TypeError, "target_mask must have dtype torch.uint8 or torch.bool"),
            "targets": (4, Tensor.float, TypeError, "masked_target must have dtype torch.int64 or torch.int32, but"),
            "rank of grad": (0, lambda x: x[:, None], ValueError, r"grad must have 1 dimensions, but .* \[11, 1\]"),
            "rows": (1, lambda x: x[1:], ValueError, r"input must have shape \[BT, H\] = \[11, 3\], but .* \[10, 3\]"),
            "features": (2, lambda w: w[:, 1:], ValueError, r"weight must have shape \[V, H\] = \[5, 3\], .* \[5, 2\]"),
            "mask": (3, lambda m: m[:1], ValueError, r"target_mask must have at least 2 bytes for 11 rows, .* \[1\]"),
            "length": (4, lambda t: t[1:], ValueError, r"masked_target must have shape \[BT\] = \[11\], but .* \[10\]"),
            "maximum": (5, lambda x: x[1:], ValueError, r"logits_max must have shape \[BT\] = \[11\], but .* \[10\]"),
            "outside": (
                4,
                lambda target: torch.full_like(target, -100),
                IndexError,
                r"masked_target must be from 0 to 4 \(rows of weight - 1\) where target_mask is 0, but one is -100",
            ),
        },
    ) + error_inputs(
        partial(_grad_arguments, softmax=True, boolean=True),
        {
            "16-bit softmax": (7, Tensor.half, TypeError, "softmax must have dtype torch.float32 for an input of"),
            "softmax": (7, lambda x: x[:, 1:], ValueError, r"softmax must have shape \[BT, V\] = \[11, 5\], .* 4\]"),
            "boolean": (3, lambda m: m[1:], ValueError, r"target_mask must have shape \[BT\] = \[11\], but .* \[10\]"),
            "expanded": (
                7,
                lambda x: x[:1].expand_as(x),
                RuntimeError,
                "softmax must not have internal overlap, because",
            ),
        },
    )
    ERROR_INPUTS.append(ErrorInput("shared memory", _square, RuntimeError, "softmax and weight must not share memory"))


def test_the_example_of_the_cann_documentation():
    ones = torch.ones(3, 4, dtype=torch.float16), torch.ones(5, 4, dtype=torch.float16)
    results = ops.fused_linear_online_max_sum(*ones, torch.ones(3, dtype=torch.int32), 0, 2, True)
    # Maxima, sums, predicted logits, mask, masked targets and logits.
    assert [one.tolist() for one in results] == [[4] * 3, [5] * 3, [0] * 3, [0], [1] * 3, [[4] * 5] * 3]


def test_the_example_of_the_cann_documentation_for_the_loss():
    statistics = torch.tensor([0.5, 1.0])
    logits = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    loss, softmax = ops.fused_cross_entropy_loss_with_max_sum(*[statistics] * 3, logits)
    torch.testing.assert_close(loss, torch.tensor([-1.193147, -1.0]))
    torch.testing.assert_close(softmax, torch.tensor([[3.297443, 2.0], [0.606531, 1.0]]))


@pytest.mark.parametrize(("start", "end", "padding"), [(0, 5, 0), (1, 5, 1), (0, 0, 1)])
def test_padding_bits_of_the_mask_are_those_of_target_0(start, end, padding):
    results = ops.fused_linear_online_max_sum(*_shard(Maker(torch.float32), rows=3), start, end)
    assert all((int(results[3][0]) >> bit) & 1 == padding for bit in range(3, 8))


def test_the_end_of_a_shard_is_exclusive():
    input, weight, _ = _shard(Maker(torch.float32), rows=3)
    *_, target_mask, masked_target, _ = ops.fused_linear_online_max_sum(input, weight, torch.tensor([1, 2, 3]), 1, 3)
    assert unpack_mask(target_mask, 3).tolist() == [False, False, True] and masked_target.tolist() == [0, 1, 0]


def test_shards_combine_to_the_loss_of_the_full_vocabulary():
    input, weight, target = Maker(torch.float64).normal(9, 4), Maker(torch.float64, 1).normal(12, 4), torch.arange(9)
    shards = [ops.fused_linear_online_max_sum(input, weight[a:b], target, a, b) for a, b in ((0, 5), (5, 6), (6, 12))]
    logits_max = torch.stack([shard[0] for shard in shards]).amax(0)
    shifted = [(shard, shard[0] - logits_max) for shard in shards]
    sum_exp_logits = sum(shard[1] * shift.exp() for shard, shift in shifted)
    predicted_logits = sum(shard[2] + shift * ~unpack_mask(shard[3], 9) for shard, shift in shifted)
    loss, _ = ops.fused_cross_entropy_loss_with_max_sum(logits_max, sum_exp_logits, predicted_logits)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(input @ weight.T, target, reduction="none"))


@pytest.mark.parametrize("softmax", [False, True])
def test_the_gradients_are_those_of_the_cross_entropy_where_no_row_is_masked(softmax):
    input, weight, target = _shard(Maker(torch.float64))
    grad = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    results = ops.fused_linear_online_max_sum(input, weight, target, 0, CLASSES, True)
    *_, target_mask, masked_target, logits = results
    statistics = (None, None, logits.softmax(1)) if softmax else (*results[:2], None)
    gradients = ops.fused_linear_cross_entropy_loss_grad(grad, input, weight, target_mask, masked_target, *statistics)
    input.requires_grad_(), weight.requires_grad_()
    loss = torch.nn.functional.cross_entropy(input @ weight.T, target, reduction="none")
    torch.testing.assert_close(gradients, torch.autograd.grad(loss, (input, weight), grad))


def test_a_given_softmax_becomes_the_gradient_of_the_logits():
    arguments = _grad_arguments(Maker(torch.float64), softmax=True)
    grad, _, _, target_mask, masked_target, _, _, softmax = arguments
    expected = softmax.clone()
    expected[torch.arange(ROWS), masked_target] -= (~unpack_mask(target_mask, ROWS)).double()
    ops.fused_linear_cross_entropy_loss_grad(*arguments)
    torch.testing.assert_close(softmax, expected * grad.unsqueeze(1))


def test_a_masked_row_has_a_gradient_until_grad_is_zero():
    grad, input, weight, _, *others = _grad_arguments(Maker(torch.float64))
    masked = torch.full((2,), 255, dtype=torch.uint8)
    input_grad, _ = ops.fused_linear_cross_entropy_loss_grad(grad, input, weight, masked, *others)
    assert (input_grad != 0).all()
    input_grad, weight_grad = ops.fused_linear_cross_entropy_loss_grad(grad * 0, input, weight, masked, *others)
    assert (input_grad == 0).all() and (weight_grad == 0).all()


def test_packing_and_unpacking_a_mask_round_trips_least_significant_bit_first():
    mask = torch.tensor([True] + [False] * 8 + [True] + [False] * 6)
    assert pack_mask(mask).tolist() == [1, 2]
    assert torch.equal(unpack_mask(pack_mask(mask), 11), mask[:11])
