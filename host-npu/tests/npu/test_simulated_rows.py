"""CANN's functions for embeddings, copies, casts and padding."""

import ctypes

import pytest
import torch
from tests._aclnn import DType, Ints, Scalar, call, phase_one
from tests._values import assert_close, moved, random, transposed


def _gradient(grad, indices, rows, padding=-1, scale=False, dtype=None):
    out = torch.full((rows, grad.shape[-1]), 9.0, dtype=dtype or grad.dtype).npu()
    given = indices.npu(), ctypes.c_uint64(rows), ctypes.c_uint64(padding), ctypes.c_bool(scale)
    call("aclnnEmbeddingDenseBackward", grad.npu(), *given, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize(
    ("count", "dim", "rows", "padding"), [(400, 33, 17, 3), (1, 5, 2, -1), (50, 600, 7, 1000)], ids=str
)
def test_the_gradient_of_an_embedding(count, dim, rows, padding, scale, dtype):
    grad, indices = random((count, dim), dtype, -1, 1), torch.randint(rows, (count,))
    used = indices != padding
    expected = torch.zeros(rows, dim, dtype=torch.float64).index_add(0, indices[used], grad[used].double())
    if scale:
        expected /= indices.bincount(minlength=rows).clamp(min=1)[:, None]
    assert_close(_gradient(grad, indices, rows, padding, scale), expected, 4)


def test_the_gradient_of_an_embedding_is_summed_in_float32():
    # Many small gradients, which a 16-bit sum would lose.
    found = _gradient(torch.ones(4096, 1, dtype=torch.bfloat16), torch.full((4096,), 2, dtype=torch.int32), 4)
    assert found.flatten().tolist() == [0, 0, 4096, 0]


def test_an_embedding_and_its_gradient_of_views():
    grad, indices = transposed(torch.arange(1.0, 7).view(2, 3)), torch.tensor([1, 9, 2], dtype=torch.int32).npu()[::2]
    out = torch.full((3, 4), 9.0).npu()
    given = indices, ctypes.c_uint64(4), ctypes.c_uint64(0), ctypes.c_bool(False)
    call("aclnnEmbeddingDenseBackward", grad, *given, out.t())
    assert out.t().tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6], [0, 0, 0]]
    weight, out = torch.arange(1.0, 7).view(2, 3).npu().t(), torch.full((9,), 9.0).npu()
    call("aclnnEmbedding", weight, torch.tensor([[2, 0], [1, 1]], dtype=torch.int32).npu(), out[1:].view(2, 2, 2))
    assert out.tolist() == [9, 3, 6, 1, 4, 2, 5, 2, 5]


def _copied(source, into):
    call("aclnnInplaceCopy", into, source)
    return into.tolist()


def test_a_copy_transposes_broadcasts_and_casts_into_a_view():
    assert _copied(torch.arange(6.0).view(3, 2).npu().t(), torch.empty(2, 3).npu()) == [[0, 2, 4], [1, 3, 5]]
    storage = torch.zeros(8, dtype=torch.bfloat16).npu()
    _copied(torch.tensor([[-1], [7]], dtype=torch.int32).npu(), storage.as_strided((2, 3), (4, 1), 1))
    assert storage.tolist() == [0, -1, -1, -1, 0, 7, 7, 7]
    numbers = torch.tensor([-1.5, 0, 2.5, 1e10]).npu()
    assert _copied(numbers, torch.empty(4, dtype=torch.int64).npu()) == [-1, 0, 2, 10**10]
    assert _copied(numbers, torch.empty(4, dtype=torch.bool).npu()) == [True, False, True, True]


# All 16-bit numbers, and values between and next to them.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_copy_rounds_to_16_bits_and_widens_them(dtype):
    edges = torch.tensor([65504, 65519.99, 65520, 2**-24, 2**-25, 1.5 * 2**-25, 2**-14, 0.0])
    scales = (1e-9, 1e-7, 3e-5, 6e-5, 1.0, 6e4, 1e38)
    values = torch.cat([edges, -edges, *(random((20000,), torch.float32, -1, 1) * scale for scale in scales)])
    rounded = torch.empty(values.shape, dtype=dtype).npu()
    call("aclnnInplaceCopy", rounded, values.npu())
    assert rounded.cpu().view(torch.int16).equal(values.to(dtype).view(torch.int16))
    patterns = torch.arange(2**16).to(torch.int16).view(dtype)
    widened = torch.empty(2**16).npu()
    call("aclnnInplaceCopy", widened, patterns.npu())
    torch.testing.assert_close(widened.cpu(), patterns.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0, 1.5, -2, 3], torch.int32, [0, 1, -2, 3]),
        ([0, 1.5, -2, 3], torch.bool, [False, True, True, True]),
        ([3e9, -3e9, torch.inf, torch.nan], torch.int32, [2147483647, -2147483648, 2147483647, 0]),
    ],
    ids=["integers", "truth", "integers saturate"],
)
def test_a_cast(values, dtype, expected):
    out = torch.empty(4, dtype=dtype).npu()
    call("aclnnCast", torch.tensor(values).npu(), DType(dtype), out)
    assert out.tolist() == expected


def _padded(x, pad, value, shape):
    out = torch.empty(shape, dtype=x.dtype).npu()
    call("aclnnConstantPadNd", x.npu(), Ints(pad), Scalar(value), out)
    return out.tolist()


def test_a_pad_has_its_value():
    x = torch.tensor([[1.0, 2], [3, 4]])
    # The same call with another value must not hit the cache.
    for value in (7.0, 8.0):
        expected = [[value, 1, 2, value, value], [value, 3, 4, value, value]]
        assert _padded(x, [1, 2], value, (2, 5)) == expected
    assert _padded(x, [0, 0, 1, 0], 8, (3, 2)) == [[8, 8], [1, 2], [3, 4]]
    assert _padded(torch.empty(0, dtype=torch.int8), [1, 1], 8, (2,)) == [8, 8]


_X = torch.ones(2, 2)
# Valid calls.
_CALLS = {
    "aclnnInplaceCopy": {"self": torch.empty(2, 3), "source": torch.ones(3)},
    "aclnnCast": {"self": _X, "dtype": DType(torch.int32), "out": torch.empty(2, 2, dtype=torch.int32)},
    "aclnnConstantPadNd": {"self": _X, "pad": Ints([1, 2]), "value": Scalar(7), "out": torch.empty(2, 5)},
}
_NULL, _INVALID = 161001, 161002
_COMPLEX32 = 33
_REFUSED = [
    *((name, argument, None, _NULL) for name, call in _CALLS.items() for argument in call.keys() - {"dtype", "pad"}),
    ("aclnnInplaceCopy", "source", torch.ones(2), _INVALID),
    ("aclnnInplaceCopy", "source", torch.ones(2, 2, 3), _INVALID),
    ("aclnnInplaceCopy", "source", torch.ones(1, 1, 1, 1, 1, 1, 1, 2, 3), _INVALID),
    ("aclnnCast", "dtype", DType(torch.int64), _INVALID),
    ("aclnnCast", "out", torch.empty(4, dtype=torch.int32), _INVALID),
    *(("aclnnConstantPadNd", "pad", Ints(pad), _INVALID) for pad in ([1], [0] * 6, [-1, 0])),
    ("aclnnConstantPadNd", "value", Scalar(7, _COMPLEX32), _INVALID),
    ("aclnnConstantPadNd", "out", torch.empty(2, 4), _INVALID),
    ("aclnnConstantPadNd", "out", torch.empty(2, 5, dtype=torch.float16), _INVALID),
]


@pytest.mark.parametrize(("name", "argument", "value", "status"), _REFUSED)
def test_phase_one_refuses(name, argument, value, status):
    found, message, _ = phase_one(name, *moved([*(_CALLS[name] | {argument: value}).values()]))
    assert (found, bool(message)) == (status, True)


@pytest.mark.parametrize("name", _CALLS)
def test_phase_one_takes(name):
    call(name, *moved([*_CALLS[name].values()]))
