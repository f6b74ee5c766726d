"""Tensors as described by ``aclCreateTensor``, and the rules of opbase and ops-math for all operators.

Sources: opbase ``composite_op/utils/tensor_view_utils.cpp``, ``common/utils/shape_utils.cpp``, ``format_utils.cpp``
and ``common_types.cpp``; ops-math ``conversion/contiguous/op_host/op_api/contiguous.cpp``.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

NULL_POINTER, INVALID, RUNTIME_ERROR = 161001, 161002, 361001
TILING, INNER_NULL_POINTER = 561002, 561103

# aclDataType
FLOAT, FLOAT16, INT8, INT32, UINT8, INT16, INT64, DOUBLE, BOOL, BF16 = 0, 1, 2, 3, 4, 6, 9, 11, 12, 27
UINT16, UINT32, UINT64, COMPLEX64, COMPLEX128, UNDEFINED = 7, 8, 10, 16, 17, -1
DTYPES = (FLOAT, FLOAT16, BF16, INT8, INT32, UINT8, INT16, UINT16, UINT32, INT64, UINT64, DOUBLE, BOOL, COMPLEX64)
DTYPES += (COMPLEX128, UNDEFINED)

# aclFormat, and numbers of ge::Format without a name in aclFormat
NCHW, NHWC, ND, NC1HWC0, FRACTAL_Z, NC1HWC0_C04, HWCN, NDHWC, FRACTAL_NZ = 0, 1, 2, 3, 4, 12, 16, 27, 29
NCDHW, DHWCN, NDC1HWC0, FRACTAL_Z_3D, NC, NCL, NZ_C0_16, NZ_C0_32, NZ_C0_2 = 30, 31, 32, 33, 35, 47, 50, 51, 52
FRACTAL_Z_C04, CHWN, NO_FORMAT = 13, 14, -1
PRIVATE = {NC1HWC0, FRACTAL_Z, NDC1HWC0, FRACTAL_Z_3D, FRACTAL_NZ, NC1HWC0_C04, NZ_C0_16, NZ_C0_32, NZ_C0_2, 53, 54}
FORMATS = (NCHW, NHWC, NC1HWC0, FRACTAL_Z, NC1HWC0_C04, HWCN, NDHWC, FRACTAL_NZ, NCDHW, DHWCN, NDC1HWC0, FRACTAL_Z_3D)
FORMATS += (NC, NCL, NZ_C0_16, NZ_C0_32, NZ_C0_2, 53, 54, FRACTAL_Z_C04, CHWN, 39, 99, NO_FORMAT, 0xFF)

Shape = tuple[int, ...]
Call = SimpleNamespace


@dataclass(frozen=True)
class Tensor:
    dtype: int
    shape: Shape
    strides: Shape
    offset: int
    storage: Shape
    format: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    @property
    def storage_format(self) -> int:
        """Return the storage's format, in which aclFormat's "undefined" has its own number."""
        return 255 if self.format == NO_FORMAT else self.format

    @property
    def dense(self) -> bool:
        """Return whether the strides are those of a contiguous tensor, whatever the format."""
        if self.numel < 2:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True

    @property
    def contiguous(self) -> bool:
        """Return whether CANN treats it as contiguous; private formats always are."""
        return self.storage_format in PRIVATE or self.dense

    @property
    def inside(self) -> bool:
        """Return whether all elements are in the storage."""
        steps = [stride * (size - 1) for size, stride in zip(self.shape, self.strides, strict=True)]
        last = self.offset + sum(max(0, step) for step in steps)
        return self.offset + sum(min(0, step) for step in steps) >= 0 and last < math.prod(self.storage)

    def but(self, **changes: object) -> "Tensor":
        """Return a copy with changes; a new shape is contiguous and fills its storage."""
        if "shape" in changes and "strides" not in changes:
            changes = {"strides": strides(changes["shape"]), "storage": changes["shape"], "offset": 0, **changes}
        return replace(self, **changes)


def strides(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor."""
    result = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        result[index] = result[index + 1] * shape[index + 1]
    return tuple(result)


class Refused(Exception):
    """A refusal by phase one with a status; ``logged`` is whether aclGetRecentErrMsg has a text."""

    def __init__(self, status: int, why: str, logged: bool = True) -> None:
        super().__init__(status, why)
        self.status, self.why, self.logged = status, why, logged
        # Like in Answer.
        self.views: dict[str, Shape] = {}


class Undefined(Exception):
    """Undefined or unknown behavior of CANN; the argument names the class."""


@dataclass
class Answer:
    """The success of phase one."""

    # The workspace size, if a document or a source states it.
    workspace: int | None = None
    # The outputs whose views change, with their new shapes.
    views: dict[str, Shape] = field(default_factory=dict)


def require(condition: bool, status: int, why: str) -> None:
    """Refuse unless the condition holds."""
    if not condition:
        raise Refused(status, why)


def require_results(call: Call) -> None:
    """Refuse null pointers for the results, the first check of every composed operator."""
    require(call.workspace_size and call.executor, NULL_POINTER, "null workspaceSize or executor")


def require_present(tensors: Iterable[Tensor | None], status: int = NULL_POINTER) -> None:
    """Refuse null pointers."""
    require(all(tensor is not None for tensor in tensors), status, "null tensor")


def require_dtype(tensor: Tensor, dtypes: Iterable[int]) -> None:
    """Refuse data types that are not in the list."""
    require(tensor.dtype in dtypes, INVALID, "dtype")


def floats(chip: str) -> tuple[int, ...]:
    """Return the floating types of a chip: DAV_2201 and regbase have bfloat16."""
    return (FLOAT, FLOAT16) if chip in ("Ascend910", "Ascend310P") else (FLOAT, FLOAT16, BF16)


def broadcast(first: Shape, second: Shape) -> Shape | None:
    """Return the shape that both broadcast to, or ``None``."""
    rank = max(len(first), len(second))
    result = []
    for one, other in zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True):
        if one != other and one != 1 and other != 1:
            return None
        result.append(other if one == 1 else one)
    return tuple(result)


def require_broadcast(first: Shape, second: Shape) -> Shape:
    """Return the shape that both broadcast to, or refuse."""
    result = broadcast(first, second)
    require(result is not None, INVALID, "broadcast")
    return result


def copy_contiguous(*tensors: Tensor | None) -> None:
    """``l0op::Contiguous``: a copied tensor must be inside its storage."""
    for tensor in tensors:
        if tensor is not None and not tensor.contiguous:
            require(tensor.inside, INNER_NULL_POINTER, "view outside of its storage")


def same_shape(result: Shape, out: Shape) -> bool:
    """Return whether a result fits an output: one element fits any shape of one element."""
    return result == out or math.prod(result) == math.prod(out) == 1


def copy_view(shape: Shape, dtype: int, out: Tensor, storage_format: int = ND) -> None:
    """``l0op::ViewCopy`` of a result to an output."""
    require(dtype == out.dtype, INNER_NULL_POINTER, "result's dtype")
    require(storage_format in (ND, out.storage_format), INNER_NULL_POINTER, "result's format")
    require(same_shape(shape, out.shape), INNER_NULL_POINTER, "result's shape")
