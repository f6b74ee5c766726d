"""Phase one of the host NPU through CANN's C interface."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from host_npu import _libraries
from tests.phase_one.tensors import Call, Shape, Tensor

_INT64 = ctypes.c_int64
_TYPES = {bool: ctypes.c_bool, int: _INT64, float: ctypes.c_double}
_UNTOUCHED = 0xDEAD


@dataclass
class Outcome:
    """The values that a call returned and wrote."""

    status: int
    # None if not written.
    workspace: int | None
    executor: bool
    logged: bool
    # The views of all tensors after the call.
    views: dict[str, tuple[Shape, Shape]]


class HostNpu:
    """The simulated libraries in this process, for the chip that the environment names."""

    def __init__(self) -> None:
        runtime = _libraries.load_cann()
        self._library = ctypes.CDLL(None)
        self._free = ctypes.CDLL("libstdc++.so.6")._ZdaPv  # delete[]
        self._free.argtypes = [ctypes.c_void_p]
        self._error = self._library.aclGetRecentErrMsg
        self._error.restype = ctypes.c_char_p
        create = self._create = self._library.aclCreateTensor
        create.restype = ctypes.c_void_p
        dims = ctypes.c_void_p
        create.argtypes = [dims, ctypes.c_uint64, ctypes.c_int, dims, _INT64, ctypes.c_int, dims, ctypes.c_uint64]
        create.argtypes += [ctypes.c_void_p]
        self._destroy = self._library.aclDestroyTensor
        self._destroy.argtypes = [ctypes.c_void_p]
        self._destroy_executor = self._library.aclDestroyAclOpExecutor
        self._destroy_executor.argtypes = [ctypes.c_void_p]
        self._dims = [self._library.aclGetViewShape, self._library.aclGetViewStrides]
        for function in self._dims:
            function.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.POINTER(_INT64)), ctypes.c_void_p]
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}
        self._arrays: dict[int, type[ctypes.Array[_INT64]]] = {}
        for started in (runtime.aclInit(None), self._library.aclnnInit(None), runtime.aclrtSetDevice(0)):
            if started != 0:
                raise RuntimeError(f"the host NPU does not start: {self._error()!r}")

    def phase_one(self, name: str, call: Call, types: Mapping[str, type]) -> Outcome:
        """Call an operator.

        Args:
            name: The operator, without ``GetWorkspaceSize``.
            call: Its arguments in order; ``workspace_size`` and ``executor`` state whether these pointers are passed.
            types: The C types of arguments that differ from the default for their Python type.
        """
        tensors = {}
        arguments: list[object] = []
        for argument, value in vars(call).items():
            if argument in ("workspace_size", "executor"):
                continue
            if value is None:
                arguments.append(ctypes.c_void_p(None))
            elif isinstance(value, Tensor):
                # An argument that is passed twice is the same object.
                handle = tensors.get(id(value)) or self._tensor(value)
                tensors[id(value)] = handle
                arguments.append(ctypes.c_void_p(handle))
            else:
                arguments.append(types.get(argument, _TYPES[type(value)])(value))
        size, executor = ctypes.c_uint64(_UNTOUCHED), ctypes.c_void_p(_UNTOUCHED)
        arguments.append(ctypes.byref(size) if call.workspace_size else None)
        arguments.append(ctypes.byref(executor) if call.executor else None)
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._library, f"{name}GetWorkspaceSize")
        status = function(*arguments)
        logged = self._error() is not None
        made = call.executor and executor.value != _UNTOUCHED
        if status == 0 and made:
            self._destroy_executor(executor)
        views = {
            argument: self._view(tensors[id(value)])
            for argument, value in vars(call).items()
            if isinstance(value, Tensor)
        }
        for handle in tensors.values():
            self._destroy(handle)
        workspace = None if size.value == _UNTOUCHED else size.value
        return Outcome(status, workspace, made, logged, views)

    def _array(self, dims: Shape) -> "ctypes.Array[_INT64]":
        kind = self._arrays.get(len(dims))
        if kind is None:
            kind = self._arrays[len(dims)] = _INT64 * len(dims)
        return kind(*dims)

    def _tensor(self, tensor: Tensor) -> int:
        rank, array = len(tensor.shape), self._array
        storage, steps = tensor.storage, array(tensor.strides)
        return self._create(
            array(tensor.shape),
            rank,
            tensor.dtype,
            steps,
            tensor.offset,
            tensor.format,
            array(storage),
            len(storage),
            None,
        )

    def _view(self, handle: int) -> tuple[Shape, Shape]:
        result = []
        for function in self._dims:
            values, count = ctypes.POINTER(_INT64)(), ctypes.c_uint64()
            function(handle, ctypes.byref(values), ctypes.byref(count))
            result.append(tuple(values[: count.value]))
            self._free(values)
        return result[0], result[1]
