"""embedding: the drop-in, its Function and the raw operator."""

from functools import partial

from torch_aclnn_ops import functional as ours
from torch_aclnn_ops import ops

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests._contract import HALF_DTYPES, Case, DropInContract, Maker, assert_same_outcome, outcome
from tests._raw_operator import RawOperatorContract, Sample, error_inputs


def _table(*shape):
    return lambda make: (make.normal(*shape),)


def _indices(high, *shape):
    return lambda make: (make.index(high, *shape),)


def _call(**options):
    return lambda F, weight, input: F.embedding(input, weight, **options)


CASES = [
    Case("matrix of indices", _table(5, 3), _call(), _indices(5, 4, 6)),
    Case("one index", _table(5, 3), _call(), _indices(5)),
    Case("no indices", _table(5, 3), _call(), _indices(5, 0)),
    Case("one column", _table(7, 1), _call(), _indices(7, 9)),
    Case("transposed table", lambda make: (make.normal(3, 5),), lambda F, w, i: F.embedding(i, w.T), _indices(5, 4)),
    Case("strided indices", _table(5, 3), lambda F, w, i: F.embedding(i[:, ::2].T, w), _indices(5, 4, 6)),
    Case("32-bit indices", _table(5, 3), lambda F, w, i: F.embedding(i.int(), w), _indices(5, 4)),
    # No index is the padding row, whose gradient is zero by definition.
    Case("padding", _table(5, 3), lambda F, w, i: F.embedding(i + 1, w, padding_idx=0), _indices(4, 6)),
    Case("negative padding", _table(5, 3), lambda F, w, i: F.embedding(i, w, padding_idx=-1), _indices(4, 6)),
]


class TestDropIn(DropInContract):
    CASES = CASES


class TestDropInScaledByFrequency(DropInContract):
    """The scaled gradient is not the derivative of the rows, so it is compared with its definition."""

    CASES = [
        Case("scaled", _table(4, 3), _call(scale_grad_by_freq=True), _indices(4, 11)),
        Case("padding, scaled", _table(4, 3), _call(padding_idx=1, scale_grad_by_freq=True), _indices(4, 11)),
    ]

    def test_first_derivatives_are_right(self, case):
        call, (weight,) = case.prepare(torch.float64)
        padding_idx = 1 if "padding" in case.name else -1
        maker = Maker(torch.float64)
        case.inputs(maker)
        (input,) = case.constants(maker)
        cotangent = torch.randn(11, 3, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(call(ours, weight), weight, cotangent)
        for row in range(4):
            looked_up = (input == row).sum() if row != padding_idx else 0
            expected = cotangent[input == row].mean(0) if looked_up else torch.zeros(3, dtype=torch.float64)
            torch.testing.assert_close(gradient[row], expected)


_dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64])
_index_dtypes = st.sampled_from([torch.int64, torch.int64, torch.int32, torch.uint8, torch.float32])


@given(
    table_shape=st.sampled_from([(5, 3), (5, 3), (1, 4), (5,), (2, 5, 3), (0, 3), (5, 0)]),
    index_shape=st.sampled_from([(), (4,), (2, 3), (0,), (2, 1, 3)]),
    dtype=_dtypes,
    index_dtype=_index_dtypes,
    offset=st.sampled_from([0, 0, 0, 0, 5, -1]),
    padding_idx=st.none() | st.integers(-6, 6),
    max_norm=st.sampled_from([None, None, 0.5]),
    norm_type=st.sampled_from([2.0, 1.0]),
    scale_grad_by_freq=st.booleans(),
    sparse=st.sampled_from([False, False, True]),
)
def test_any_call_behaves_like_torchs(
    table_shape, index_shape, dtype, index_dtype, offset, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
):
    input = (Maker(torch.float64).index(5, *index_shape) + offset).to(index_dtype)
    outcomes = []
    for module in (ours, torch.nn.functional):
        weight = Maker(dtype, 1).normal(*table_shape).requires_grad_(dtype.is_floating_point)
        call = partial(module.embedding, input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        outcomes.append(outcome(call, [weight]))
    mine, theirs = outcomes
    tolerance = torch.finfo(dtype).eps * 16 if dtype.is_floating_point else 0
    assert_same_outcome(mine, theirs, rtol=tolerance, atol=tolerance)


def test_max_norm_changes_the_table_as_torch_does():
    found = []
    for module in (ours, torch.nn.functional):
        table = Maker(torch.float32).normal(6, 4) * 3
        found.append((module.embedding(torch.tensor([1, 1, 4]), table, max_norm=1.0), table))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert table[1].norm() <= 1 + 1e-6 < table[2].norm()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_many_16_bit_gradients_of_one_row_are_accumulated_without_stalling(dtype):
    # 4096 times 1 + 2^-6: a 16-bit sum stops growing at 2048 (float16) or 256 (bfloat16).
    weight = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    rows = ours.embedding(torch.zeros(4096, dtype=torch.int64), weight)
    rows.backward(torch.full_like(rows, 1 + 2**-6))
    assert weight.grad.tolist() == [[4160.0], [0.0]]


def _rows_and_indices(make, high, *shape, dim=3):
    return make.normal(*shape, dim), make.index(high, *shape)


_RANGE = r"indices must be from 0 to 3 \(num_weights - 1\), but one is"
ERRORS = {
    "integers": (0, Tensor.long, TypeError, "grad_output must have a floating-point dtype, but it has torch.int64"),
    "bfloat16 indices": (
        1,
        Tensor.bfloat16,
        TypeError,
        "indices must have dtype torch.int64 or .* or torch.float64, but it has torch.bfloat16",
    ),
    "gradient without rows": (
        (0, 1),
        lambda one: one.flatten()[0],
        ValueError,
        r"grad_output must have at least 1 dimension, but its shape is \[\]",
    ),
    "number of rows": (
        1,
        lambda indices: indices[1:],
        ValueError,
        r"grad_output must have one row per index, but its shape \[6, 3\] has 6 rows for 5 indices",
    ),
    "negative num_weights": (2, lambda _: -1, ValueError, "num_weights must be at least 0, but it is -1"),
    "index too large": (1, lambda _: torch.tensor([0, 4, 0, 0, 0, 0]), IndexError, f"{_RANGE} 4"),
    "negative index": (1, lambda _: torch.tensor([0, -1, 0, 0, 0, 0]), IndexError, f"{_RANGE} -1"),
}


class TestRawOperator(RawOperatorContract):
    OPERATOR = ops.embedding_dense_backward
    SAMPLES = [
        Sample("rows", lambda make: (*_rows_and_indices(make, 5, 4, 6), 5, -1, False)),
        Sample("padding", lambda make: (*_rows_and_indices(make, 5, 12), 5, 2, False)),
        Sample("scaled by frequency", lambda make: (*_rows_and_indices(make, 4, 11), 4, -1, True)),
        Sample("padding, scaled by frequency", lambda make: (*_rows_and_indices(make, 4, 11), 4, 0, True)),
        Sample("padding that never matches", lambda make: (*_rows_and_indices(make, 4, 11), 4, 99, False)),
        Sample("padding that is negative", lambda make: (*_rows_and_indices(make, 4, 11), 4, -4, False)),
        Sample("one index", lambda make: (make.normal(3), make.index(4), 4, -1, False)),
        Sample("no indices", lambda make: (*_rows_and_indices(make, 4, 0), 4, -1, False)),
        Sample("rows of no elements", lambda make: (*_rows_and_indices(make, 4, 6, dim=0), 4, -1, False)),
        Sample("leading dimensions of another", lambda make: (make.normal(2, 6, 3), make.index(4, 12), 4, -1, True)),
        Sample("not contiguous", lambda make: (make.normal(3, 5).T, make.index(4, 5, 2)[:, 0], 4, -1, False)),
        *(
            Sample(
                f"indices of {dtype}",
                lambda make, dtype=dtype: (make.normal(6, 3), make.index(2, 6).to(dtype), 4, -1, True),
            )
            for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float16, torch.float64)
        ),
    ]
    ERROR_INPUTS = error_inputs(lambda make: (*_rows_and_indices(make, 4, 6), 4, -1, False), ERRORS)


def test_the_example_of_the_cann_documentation():
    rows = torch.arange(1.0, 7.0).reshape(2, 3)
    gradient = ops.embedding_dense_backward(rows, torch.tensor([1, 2]), 4, 0, False)
    assert gradient.tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6], [0, 0, 0]]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_indices_are_passed_to_torch(layout):
    weight = torch.randn(6, 3)
    nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3, 0, 1])], layout=layout)
    rows, expected = (each.embedding(nested, weight).unbind() for each in (ours, torch.nn.functional))
    assert all(map(torch.equal, rows, expected)) and [row.shape[0] for row in rows] == [2, 3]
