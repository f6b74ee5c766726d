"""CANN's functions for empty tensors and for indices out of range."""

import ctypes

import pytest
import torch
from tests._aclnn import call
from tests._values import moved

_NONE, _NO_ROWS, _NO_INDICES = torch.empty(0, 2), torch.empty(0, 3), torch.empty(0, dtype=torch.int64)
_OUT = "the output"
_TABLE = ctypes.c_uint64(4), ctypes.c_uint64(0), ctypes.c_bool(False)
# A function and its arguments, the output's shape, and the final contents of its storage, which was filled with 7.
_CALLS = [
    *(
        ("aclnnMseLossBackward", (torch.tensor(1.0), _NONE, torch.empty(1, 2), reduction, _OUT), (0, 2), [7] * 4)
        for reduction in range(3)
    ),
    ("aclnnMseLoss", (_NONE, _NONE, 0, _OUT), (0, 2), [7]),
    ("aclnnMseLoss", (_NONE, _NONE, 1, _OUT), (), [torch.nan]),
    ("aclnnMseLoss", (_NONE, _NONE, 2, _OUT), (), [0]),
    ("aclnnMseLossOut", (_NONE, _NONE, 1, _OUT), (2,), [7, 7]),
    # All of the storage is filled, whatever the shape.
    *(
        ("aclnnBinaryCrossEntropy", (_NONE, _NONE, None, reduction, _OUT), shape, [left] * 5)
        for reduction, left in ((0, 0), (1, torch.nan), (2, 0))
        for shape in ((0, 2), (), (3,))
    ),
    # Shapes are not compared.
    (
        "aclnnBinaryCrossEntropyBackward",
        (torch.ones(2, 2), torch.empty(2, 0), torch.ones(3), torch.ones(2, 2), 0, _OUT),
        (5,),
        [7] * 5,
    ),
    ("aclnnEmbeddingDenseBackward", (_NO_ROWS, _NO_INDICES, *_TABLE, _OUT), (4, 3), [0] * 12),
    ("aclnnEmbedding", (torch.empty(10, 0), torch.tensor([1, 2, 3, 4]), _OUT), (4, 0), [7]),
    ("aclnnEmbedding", (torch.ones(10, 3), _NO_INDICES, _OUT), (0, 3), [7]),
]


@pytest.mark.parametrize(("name", "arguments", "shape", "left"), _CALLS)
def test_what_is_left_in_the_output_of_nothing(name, arguments, shape, left):
    storage = torch.full((len(left),), 7.0).npu()
    out = storage.as_strided(shape, torch.empty(shape).stride())
    call(name, *(out if each is _OUT else moved(each) for each in arguments))
    torch.testing.assert_close(storage.cpu(), torch.tensor(left, dtype=torch.float32), equal_nan=True)


def _rows(*indices):
    out = torch.empty(4, 3).npu()
    call(
        "aclnnEmbeddingDenseBackward",
        *moved((torch.arange(1.0, 7).view(2, 3), torch.tensor(indices))),
        *(ctypes.c_uint64(4), ctypes.c_uint64(-1), ctypes.c_bool(False), out),
    )
    return out.tolist()


def _chosen(*indices):
    out = torch.empty(len(indices), 3).npu()
    call("aclnnEmbedding", *moved((torch.ones(10, 3), torch.tensor(indices))), out)
    return out.tolist()


@pytest.mark.parametrize(("function", "index"), [(_rows, 4), (_rows, -2), (_chosen, 10), (_chosen, -1)])
def test_an_index_out_of_range_is_a_fault_of_the_device(function, index):
    with pytest.raises(RuntimeError, match="error code is 507015"):
        function(1, index)
    assert function(1, 2)


def test_indices_of_a_gradient_are_narrowed_to_32_bits():
    assert _rows(1, 2**32 + 2) == [[0, 0, 0], [1, 2, 3], [4, 5, 6], [0, 0, 0]]
