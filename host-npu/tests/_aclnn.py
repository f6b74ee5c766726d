"""Calls of CANN's two-phase functions through ctypes, on tensors that the caller describes."""

import ctypes
from typing import Any, NamedTuple

import torch
from tests._runtime import message

_OPAPI = ctypes.CDLL("libopapi.so")
_NNOPBASE = ctypes.CDLL("libnnopbase.so")
_ACL_DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.uint8: 4,
    torch.int64: 9,
    torch.bool: 12,
    torch.bfloat16: 27,
}
DTYPES = tuple(_ACL_DTYPES)
_ND = 2


class Scalar(NamedTuple):
    """An aclScalar of an aclDataType, float by default."""

    value: float
    dtype: int = 0


class Ints(NamedTuple):
    """An aclIntArray."""

    values: list[int]


class DType(NamedTuple):
    """An aclDataType."""

    dtype: torch.dtype


def _pointer(create: Any, *arguments: object) -> ctypes.c_void_p:
    create.restype = ctypes.c_void_p
    return ctypes.c_void_p(create(*arguments))


def _described(tensor: torch.Tensor) -> ctypes.c_void_p:
    sizes = (ctypes.c_int64 * max(tensor.dim(), 1))(*tensor.shape)
    strides = (ctypes.c_int64 * max(tensor.dim(), 1))(*tensor.stride())
    count, dtype = ctypes.c_uint64(tensor.dim()), _ACL_DTYPES[tensor.dtype]
    storage = (ctypes.c_int64 * 1)(tensor.untyped_storage().nbytes() // tensor.element_size())
    memory = ctypes.c_void_p(tensor.untyped_storage().data_ptr())
    offset = ctypes.c_int64(tensor.storage_offset())
    create = _NNOPBASE.aclCreateTensor
    return _pointer(create, sizes, count, dtype, strides, offset, _ND, storage, ctypes.c_uint64(1), memory)


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _described(value)
    if isinstance(value, list):
        members = (ctypes.c_void_p * len(value))(*(_described(each).value for each in value))
        return _pointer(_NNOPBASE.aclCreateTensorList, members, ctypes.c_uint64(len(value)))
    if isinstance(value, Scalar):
        return _pointer(_NNOPBASE.aclCreateScalar, ctypes.byref(ctypes.c_float(value.value)), value.dtype)
    if isinstance(value, Ints):
        values = (ctypes.c_int64 * len(value.values))(*value.values)
        return _pointer(_NNOPBASE.aclCreateIntArray, values, ctypes.c_uint64(len(value.values)))
    if isinstance(value, DType):
        return ctypes.c_int32(_ACL_DTYPES[value.dtype])
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, str):
        return ctypes.c_char_p(value.encode())
    if value is None:
        return ctypes.c_void_p()
    return value if isinstance(value, ctypes._SimpleCData) else ctypes.c_int64(value)


def _phase_one(name: str, arguments: tuple[object, ...]) -> tuple[int, ctypes.c_uint64, ctypes.c_void_p]:
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    given = [_argument(each) for each in arguments]
    status: int = getattr(_OPAPI, f"{name}GetWorkspaceSize")(*given, ctypes.byref(size), ctypes.byref(executor))
    return status, size, executor


def phase_one(name: str, *arguments: object) -> tuple[int, str, ctypes.c_void_p]:
    """Call phase one and return its status, its message and the executor."""
    status, _, executor = _phase_one(name, arguments)
    return status, (message() or "") if status else "", executor


def call(name: str, *arguments: object) -> None:
    """Call both phases and synchronize."""
    torch.npu.synchronize()
    status, size, executor = _phase_one(name, arguments)
    assert status == 0, message()
    workspace = torch.empty(size.value, dtype=torch.uint8, device="npu")
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    address = ctypes.c_void_p(workspace.data_ptr() or None)
    assert getattr(_OPAPI, name)(address, size, executor, stream) == 0, message()
    torch.npu.synchronize()
