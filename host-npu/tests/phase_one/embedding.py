"""aclnnEmbedding and aclnnEmbeddingDenseBackward.

Sources: ops-nn ``index/embedding/op_api/aclnn_embedding.cpp``, ``index/gather_v2/op_host/op_api/gather_v2.cpp``,
``index/embedding_dense_grad_v2/op_api/aclnn_embedding_dense_backward.cpp`` and its tiling; ops-math ``zero_op.cpp``.
The limit of the Ascend910 is that of the document of aclnnEmbeddingDenseBackward.
"""

import math

from tests.phase_one.draws import Draw
from tests.phase_one.tensors import (
    BF16,
    BOOL,
    COMPLEX64,
    COMPLEX128,
    DOUBLE,
    FLOAT,
    FLOAT16,
    INNER_NULL_POINTER,
    INT8,
    INT16,
    INT32,
    INT64,
    INVALID,
    PRIVATE,
    UINT8,
    Answer,
    Call,
    Undefined,
    copy_contiguous,
    copy_view,
    floats,
    require,
    require_dtype,
    require_present,
    require_results,
)

ODD = {
    "num_weights": (0, 0, 1, 4, 2**31),
    "padding_idx": (0, 1, 2**64 - 1, 10**9),
    "scale": (False, True),
}

_WEIGHTS = (DOUBLE, FLOAT, FLOAT16, INT64, INT32, INT16, INT8, UINT8, BOOL, COMPLEX128, COMPLEX64)
_INDICES = (FLOAT16, FLOAT, DOUBLE, INT8, UINT8, INT16, INT32, INT64, BOOL)
_CORES_OF_910 = 32


def embedding(call: Call, chip: str) -> Answer:
    """Rows of a weight. Only the copy of the result compares out's last size with the weight's."""
    require_results(call)
    weight, indices, out = call.weight, call.indices, call.out
    require_present((weight, indices, out))
    require_dtype(weight, (*_WEIGHTS, BF16) if BF16 in floats(chip) else _WEIGHTS)
    require(out.dtype == weight.dtype, INVALID, "out's dtype")
    require_dtype(indices, (INT32, INT64))
    require(max(len(tensor.shape) for tensor in (weight, indices, out)) <= 8, INVALID, "rank")
    require(len(out.shape) == len(indices.shape) + 1 and out.shape[:-1] == indices.shape, INVALID, "out's shape")
    if weight.empty or indices.empty:
        return Answer(workspace=0)
    copy_contiguous(weight, indices)
    if not weight.shape:
        raise Undefined("Embedding reads the last dimension of a weight that has none")
    copy_view(indices.shape + weight.shape[1:], weight.dtype, out)
    return Answer()


def embedding_dense_backward(call: Call, chip: str) -> Answer:
    """The gradient of the weight. Sizes are compared as products."""
    require_results(call)
    grad, indices, out = call.grad, call.indices, call.out
    require_present((grad, indices, out))
    require_dtype(grad, floats(chip))
    require_dtype(indices, _INDICES)
    require_dtype(out, floats(chip))
    require(max(len(tensor.shape) for tensor in (grad, indices, out)) <= 8, INVALID, "rank")
    if not grad.shape:
        raise Undefined("EmbeddingDenseBackward reads the last dimension of a grad that has none")
    dim, rows = grad.shape[-1], math.prod(grad.shape[:-1])
    require(dim == 0 or rows == indices.numel, INVALID, "grad's rows")
    require(out.shape == (call.num_weights, dim), INVALID, "out's shape")
    for tensor in (grad, indices, out):
        require(tensor.storage_format not in PRIVATE, INVALID, "private format")
    if grad.empty or indices.empty:
        # The zeros have out's layout, for which out is copied.
        copy_contiguous(out)
        return Answer()
    copy_contiguous(grad, indices)
    _require_kernel(call, chip, rows, dim)
    return Answer()


def _require_kernel(call: Call, chip: str, rows: int, dim: int) -> None:
    if chip in ("Ascend910B", "Ascend910_93"):
        require(call.num_weights > 0 or not call.scale, INNER_NULL_POINTER, "no rows to scale")
    elif chip == "Ascend950":
        refused = not call.indices.shape and dim > 2048 and call.num_weights > 5 * dim
        require(not refused, INNER_NULL_POINTER, "a scalar index of wide rows")
        limit = 512 if call.grad.dtype == FLOAT else 1024
        if call.num_weights == 0 and not (rows >= dim and rows >= limit):
            raise Undefined("EmbeddingDenseBackward divides by numWeights 0 on the Ascend950")
    elif chip == "Ascend310P":
        raise Undefined(
            "EmbeddingDenseBackward on the Ascend310P: a closed-source kernel; the documentation does not list the chip"
        )
    elif call.scale:
        counts = call.num_weights // _CORES_OF_910 + call.num_weights % _CORES_OF_910
        bytes_of_a_count, bytes_of_a_column = (8, 20) if call.indices.dtype == INT64 else (4, 36)
        # The document's divisions are integer divisions, as in the counts.
        fits = dim < (180192 - counts * bytes_of_a_count) // bytes_of_a_column
        require(fits, INNER_NULL_POINTER, "too large to scale")


def draw_forward(draw: Draw) -> Call:
    """Draw a call of aclnnEmbedding."""
    dtype = draw.one(_WEIGHTS) if draw.chance(0.5) else draw.dtype()
    weight = (draw.size(), draw.size()) if draw.chance(0.8) else draw.shape()
    indices = draw.shape(0, 3)
    return Call(
        weight=draw.tensor(weight, dtype),
        indices=draw.tensor(indices, draw.one((INT32, INT64))),
        out=draw.tensor((*indices, weight[-1] if weight else 1), dtype),
    )


def draw_backward(draw: Draw) -> Call:
    """Draw a call of aclnnEmbeddingDenseBackward."""
    indices = () if draw.chance(0.2) else draw.shape(0, 3)
    # Around the limits of the kernels of the Ascend910, for 4 rows, and of the Ascend950.
    dim = draw.one((2048, 2056, 5004, 5005, 9007, 9008)) if draw.chance(0.2) else draw.size()
    rows = indices if draw.chance(0.8) else (math.prod(indices),)
    num_weights = draw.one((4, 4, 4096, 5 * dim, 5 * dim + 1, 44000)) if draw.chance(0.3) else draw.size()
    dtype = draw.dtype()
    return Call(
        grad=draw.tensor((*rows, dim), dtype),
        indices=draw.tensor(indices, draw.one((INT32, INT64)) if draw.chance(0.7) else draw.one(_INDICES)),
        num_weights=num_weights,
        padding_idx=draw.one((0, 1, 2**64 - 1, num_weights)),
        scale=draw.chance(0.5),
        out=draw.tensor((num_weights, dim), draw.dtype() if draw.chance(0.3) else dtype),
    )
