"""aclnnFusedLinearOnlineMaxSum, aclnnFusedCrossEntropyLossWithMaxSum and aclnnFusedLinearCrossEntropyLossGrad.

Sources: ops-nn ``matmul/fused_linear_online_max_sum``, ``loss/fused_cross_entropy_loss_with_max_sum`` and
``matmul/fused_linear_cross_entropy_loss_grad``: ``aclnn_*.cpp``, what they call in ``l0op``, and the tilings.
In the version of these rules (9.1.0), the last one supports only the Ascend910B and the Ascend910_93.
"""

import math

from tests.phase_one.draws import Draw
from tests.phase_one.tensors import (
    BF16,
    BOOL,
    FLOAT,
    FLOAT16,
    INNER_NULL_POINTER,
    INT32,
    INT64,
    INVALID,
    ND,
    NULL_POINTER,
    RUNTIME_ERROR,
    UINT8,
    Answer,
    Call,
    Tensor,
    Undefined,
    copy_contiguous,
    copy_view,
    require,
    require_dtype,
    require_present,
    require_results,
)

ODD = {
    "start": (-1, 0, 5),
    "end": (-1, 0, 4, 2**24, 2**24 + 1),
    "label_smoothing": (0.0, 0.0, 0.1, -1.0, math.nan),
}

_LIBRARY = 16 * 1024 * 1024
_CUBES = 24
_A2_A3 = ("Ascend910B", "Ascend910_93")


def _ceil(value: int, of: int) -> int:
    return -(-value // of)


def _workspace(size: int) -> int:
    """Return the size that CANN's allocator uses for a kernel's workspace: 32 bytes more, in multiples of 512."""
    return _ceil(size + 32, 512) * 512


def _tensors(call: Call) -> list[Tensor]:
    return [value for value in vars(call).values() if isinstance(value, Tensor)]


def _dense(call: Call) -> bool:
    return all(tensor.contiguous for tensor in _tensors(call))


def online_max_sum(call: Call, chip: str) -> Answer:
    """The statistics of a linear layer's logits."""
    require_results(call)
    inputs = (call.input, call.weight, call.target)
    vectors = (call.max, call.sum, call.predicted)
    require_present((*inputs, *vectors, call.mask, call.masked_target))
    for tensor in (call.input, call.weight):
        require_dtype(tensor, (FLOAT16, BF16))
    require_dtype(call.target, (INT32, INT64))
    dtypes = [(call.weight, call.input.dtype), *((vector, FLOAT) for vector in vectors), (call.mask, UINT8)]
    dtypes += [(call.masked_target, call.target.dtype), (call.logits, call.input.dtype)]
    require(all(tensor is None or tensor.dtype == dtype for tensor, dtype in dtypes), INVALID, "dtype")
    ranks = [(tensor, 2) for tensor in (call.input, call.weight)]
    ranks += [(tensor, 1) for tensor in (call.target, *vectors, call.mask, call.masked_target)]
    require(all(len(tensor.shape) == rank for tensor, rank in ranks), INVALID, "rank")
    (m, k), n = call.input.shape, call.weight.shape[0]
    require(n > 0 and k <= 65534 and call.weight.shape[1] == k, INVALID, "weight's shape")
    require(all(tensor.shape == (m,) for tensor in (call.target, *vectors, call.masked_target)), INVALID, "length")
    require(call.mask.shape == (_ceil(m, 8),), INVALID, "mask's length")
    require(call.logits is None or call.logits.shape == (m, n), INVALID, "logits' shape")
    require(0 <= call.start <= call.end, INVALID, "vocabulary's indices")
    if m == 0:
        return Answer(workspace=0)
    if not all(tensor.contiguous or tensor.inside for tensor in inputs):
        raise Undefined("OnlineMaxSum goes on with the null pointer of a view outside of its storage")
    for out in (*vectors, call.mask, call.masked_target):
        copy_view(out.shape, out.dtype, out, call.target.storage_format)
    if call.logits is not None:
        copy_view(call.logits.shape, call.logits.dtype, call.logits, call.input.storage_format)
    # If there is no kernel or the tiling refuses, phase one still succeeds: it ignores the result of the launch.
    if chip not in _A2_A3 or not _dense(call):
        return Answer()
    cubes = min(_CUBES, _ceil(m, 128) * _ceil(n, 256))
    tile = 0 if call.logits is not None else 128 * 256 * 2 * cubes * 2
    return Answer(workspace=_workspace(_LIBRARY + m * 4 * cubes * 2 + tile))


def loss_with_max_sum(call: Call, chip: str) -> Answer:
    """The loss and the softmax from the statistics. The rows of the logits are not compared with the statistics."""
    require_results(call)
    vectors = (call.max, call.sum, call.predicted, call.loss)
    require_present(vectors)
    logits, softmax = call.logits, call.softmax
    require(logits is None or softmax is not None, NULL_POINTER, "null softmax")
    for vector in vectors:
        require_dtype(vector, (FLOAT,))
    if logits is not None:
        require_dtype(logits, (FLOAT, FLOAT16, BF16))
        require_dtype(softmax, (FLOAT,))
    require(len(call.max.shape) == 1, INVALID, "rank")
    require(all(vector.shape == call.max.shape for vector in vectors), INVALID, "length")
    if logits is not None:
        require(len(logits.shape) == 2 and logits.shape == softmax.shape, INVALID, "logits' shape")
    require(call.label_smoothing == 0, INVALID, "labelSmoothing")
    copy_contiguous(*vectors[:3], logits)
    rows = call.max.shape[0]
    if chip in _A2_A3 and logits is None and rows == 0:
        raise Undefined("FusedCrossEntropyLossWithMaxSum without logits and rows divides by zero")
    # As above, phase one ignores refusals of the tiling and missing kernels.
    if not _dense(call) or chip in ("Ascend910", "Ascend310P"):
        return Answer()
    refused = chip == "Ascend950" and (rows == 0 if logits is None else logits.empty)
    return Answer(workspace=None if refused else _workspace(_LIBRARY))


class LossGrad:
    """The gradients. The tiling keeps a setting of a large call for all later calls."""

    def __init__(self) -> None:
        self._base = (128, 256)

    def __call__(self, call: Call, chip: str) -> Answer:
        """Return the answer to a call."""
        require_results(call)
        statistics = (call.max, call.sum) if call.softmax is None else (call.softmax,)
        inputs = (call.grad, call.input, call.weight, call.mask, call.masked_target)
        outputs = (call.input_grad, call.weight_grad)
        require_present((*statistics, *inputs, *outputs))
        for tensor in (call.grad, *statistics):
            require_dtype(tensor, (FLOAT,))
        for tensor in (call.input, call.weight):
            require_dtype(tensor, (FLOAT16, BF16))
        require_dtype(call.mask, (BOOL, UINT8))
        require_dtype(call.masked_target, (INT32, INT64))
        same = (call.weight, *outputs)
        require(all(tensor.dtype == call.input.dtype for tensor in same), INVALID, "dtypes differ")
        used = (*inputs, *statistics, *outputs)
        require(all(tensor.storage_format == ND for tensor in used), INVALID, "format")
        require(call.label_smoothing == 0, INVALID, "labelSmoothing")
        self._require_shapes(call)
        if call.input.empty or call.weight.empty:
            return Answer(workspace=0)
        require(chip in _A2_A3, RUNTIME_ERROR, "chip")
        if not all(tensor.contiguous or tensor.inside for tensor in (*inputs, *statistics)):
            raise Undefined("LossGrad goes on with the null pointer of a view outside of its storage")
        size = self._tile(call)
        return Answer(workspace=_workspace(size) if all(tensor.contiguous for tensor in used) else None)

    @staticmethod
    def _require_shapes(call: Call) -> None:
        ranks = [(tensor, 1) for tensor in (call.grad, call.mask, call.masked_target)]
        ranks += [(tensor, 2) for tensor in (call.input, call.weight, call.input_grad, call.weight_grad)]
        ranks += [(call.max, 1), (call.sum, 1)] if call.softmax is None else [(call.softmax, 2)]
        require(all(len(tensor.shape) == rank for tensor, rank in ranks), INVALID, "rank")
        rows, (vocabulary, hidden) = call.grad.shape[0], call.weight.shape
        require(call.input.shape == (rows, hidden), INVALID, "input's shape")
        require(vocabulary >= 128 or call.softmax is None, INVALID, "small vocabulary")
        bits = call.mask.shape[0]
        require(bits == rows if call.mask.dtype == BOOL else bits * 8 >= rows, INVALID, "mask's length")
        require(call.masked_target.shape == (rows,), INVALID, "maskedTarget's length")
        if call.softmax is None:
            require(call.max.shape == call.sum.shape == (rows,), INVALID, "statistics' length")
        else:
            require(call.softmax.shape == (rows, vocabulary), INVALID, "softmax's shape")
        require(call.input_grad.shape == (rows, hidden), INVALID, "inputGradOut's shape")
        require(call.weight_grad.shape == (vocabulary, hidden), INVALID, "weightGradOut's shape")

    def _tile(self, call: Call) -> int:
        """Refuse what the tiling refuses, and return the workspace size."""
        rows, (vocabulary, hidden) = call.grad.shape[0], call.weight.shape
        if call.softmax is None:
            require(hidden <= 65535, INNER_NULL_POINTER, "large hidden size")
            tiles = 2 * 4 * _CUBES * (128 * 256 + 128 * hidden + 256 * hidden)
            return _LIBRARY + tiles + 4 * (rows * hidden + vocabulary * hidden)
        if rows >= 23296:
            self._base = (256, 128)
        base_m, base_n = self._base
        padded, tail = _ceil(rows, 16) * 16, rows % 64 or 64
        require(padded - tail <= 65535, INNER_NULL_POINTER, "many rows")
        # A row of the softmax must fit into half of the unified buffer of 192 KiB minus 32 bytes.
        require(_ceil(vocabulary * 4, 64) * 64 <= (196608 - 32) // 2, INNER_NULL_POINTER, "large vocabulary")
        require(hidden <= 65535, INNER_NULL_POINTER, "large hidden size")
        blocks = max(_ceil(rows, base_m), _ceil(vocabulary, base_m))
        copies = min(_ceil(2 * _CUBES - 1, _ceil(hidden, base_n)) + 1, blocks)
        return _LIBRARY + max(_ceil(vocabulary, 16) * 16, padded) * base_m * copies * 2


def _rows(draw: Draw) -> int:
    return draw.one((0, 1, 2, 3, 7, 8, 9, 16, 17, 64, 128, 129, 300, 5000))


def draw_max_sum(draw: Draw) -> Call:
    """Draw a call of aclnnFusedLinearOnlineMaxSum."""
    m, k, n = _rows(draw), draw.one((0, 1, 4, 4, 64, 65534, 65535)), draw.one((1, 5, 5, 256, 257, 40000))
    dtype, target = draw.one((FLOAT16, BF16)), draw.one((INT32, INT64))
    format, logits_format = draw.format(0.03), draw.format(0.03)
    start = draw.one((0, 0, 3))
    return Call(
        input=draw.tensor((m, k), dtype, logits_format),
        weight=draw.tensor((n, k), dtype),
        target=draw.tensor((m,), target, format),
        start=start,
        end=start + draw.one((0, 1, n)),
        max=draw.tensor((m,), FLOAT, format),
        sum=draw.tensor((m,), FLOAT, format),
        predicted=draw.tensor((m,), FLOAT, format),
        mask=draw.tensor((_ceil(m, 8),), UINT8, format),
        masked_target=draw.tensor((m,), target, format),
        logits=None if draw.chance(0.4) else draw.tensor((m, n), dtype, logits_format),
    )


def draw_loss(draw: Draw) -> Call:
    """Draw a call of aclnnFusedCrossEntropyLossWithMaxSum."""
    rows, columns = _rows(draw), draw.one((0, 1, 2, 5, 300))
    with_logits = draw.chance(0.6)
    logits = (draw.size() if draw.chance(0.1) else rows, columns)
    vectors = [draw.tensor((rows,), FLOAT) for _ in range(4)]
    return Call(
        max=vectors[0],
        sum=vectors[1],
        predicted=vectors[2],
        label_smoothing=0.0,
        input=draw.tensor((rows,), FLOAT) if draw.chance(0.3) else None,
        weight=draw.tensor((rows,), FLOAT) if draw.chance(0.3) else None,
        logits=draw.tensor(logits, draw.one((FLOAT, FLOAT16, BF16))) if with_logits else None,
        loss=vectors[3],
        softmax=draw.tensor(logits, FLOAT) if with_logits or draw.chance(0.1) else None,
    )


def draw_grad(draw: Draw) -> Call:
    """Draw a call of aclnnFusedLinearCrossEntropyLossGrad."""
    rows = draw.one((23295, 23296, 65536, 65537, 65600)) if draw.chance(0.04) else _rows(draw)
    hidden = draw.one((1, 4, 4, 128, 300)) if draw.chance(0.93) else draw.one((0, 65535, 65536))
    with_softmax = draw.chance(0.5)
    vocabulary = draw.one((128, 129, 130, 255, 4000) if with_softmax else (1, 5, 128, 4000))
    if draw.chance(0.06):
        vocabulary = draw.one((0, 127, 24560, 24561, 65280, 65281))
    dtype = draw.one((FLOAT16, BF16))
    packed = draw.chance(0.5)
    mask = _ceil(rows, 8) + draw.one((0, 0, 3)) if packed else rows
    statistics = not with_softmax or draw.chance(0.2)
    return Call(
        grad=draw.tensor((rows,), FLOAT, ND),
        input=draw.tensor((rows, hidden), dtype, ND),
        weight=draw.tensor((vocabulary, hidden), dtype, ND),
        mask=draw.tensor((mask,), UINT8 if packed else BOOL, ND),
        masked_target=draw.tensor((rows,), draw.one((INT32, INT64)), ND),
        label_smoothing=0.0,
        max=draw.tensor((rows,), FLOAT, ND) if statistics else None,
        sum=draw.tensor((rows,), FLOAT, ND) if statistics else None,
        softmax=draw.tensor((rows, vocabulary), FLOAT, ND) if with_softmax else None,
        input_grad=draw.tensor((rows, hidden), dtype, ND),
        weight_grad=draw.tensor((vocabulary, hidden), dtype, ND),
    )
