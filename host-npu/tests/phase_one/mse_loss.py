"""aclnnMseLoss, aclnnMseLossOut and aclnnMseLossBackward.

Sources: ops-nn ``loss/mse_loss/op_api/aclnn_mse_loss.cpp``, ``aclnn_mse_loss_out.cpp``,
``loss/common/level2_base_loss.h`` and ``loss/mse_loss_grad_v2/op_host/op_api/aclnn_mse_loss_backward.cpp``.
"""

from tests.phase_one.draws import Draw
from tests.phase_one.tensors import (
    INVALID,
    Answer,
    Call,
    Shape,
    Undefined,
    broadcast,
    copy_contiguous,
    floats,
    require,
    require_broadcast,
    require_dtype,
    require_present,
    require_results,
)

ODD = {"reduction": (-1, 0, 1, 2, 3, 2**40)}


def _forward(call: Call, chip: str) -> Shape:
    require_results(call)
    require_present((call.self, call.target, call.out))
    # Floats promote to a float that the chip supports.
    for tensor in (call.self, call.target, call.out):
        require_dtype(tensor, floats(chip))
    require(0 <= call.reduction <= 2, INVALID, "reduction")
    require(max(len(call.self.shape), len(call.target.shape)) <= 8, INVALID, "rank")
    return require_broadcast(call.self.shape, call.target.shape)


def mse_loss(call: Call, chip: str) -> Answer:
    """The loss or losses. For a mean or sum, the output has no dimensions."""
    shape = _forward(call, chip)
    require(call.out.shape == (() if call.reduction else shape), INVALID, "out's shape")
    if call.self.empty or call.target.empty:
        # A mean or sum fills its output with a kernel.
        return Answer(workspace=None if call.reduction else 0)
    copy_contiguous(call.self, call.target)
    return Answer()


def mse_loss_out(call: Call, chip: str) -> Answer:
    """The same, reduced over the first dimension."""
    shape = _forward(call, chip)
    require(call.out.shape == (shape[1:] if call.reduction else shape), INVALID, "out's shape")
    if call.self.empty or call.target.empty:
        return Answer(workspace=0)
    copy_contiguous(call.self, call.target)
    if not shape and call.reduction:
        raise Undefined("aclnnMseLossOut reduces dimension 0 of a scalar")
    return Answer()


def mse_loss_backward(call: Call, chip: str) -> Answer:
    """The gradient. Inputs are not promoted; the result is cast to out."""
    require_results(call)
    inputs = (call.grad, call.self, call.target)
    require_present((*inputs, call.out))
    require(call.grad.dtype == call.self.dtype == call.target.dtype, INVALID, "dtypes differ")
    require_dtype(call.self, floats(chip))
    require_dtype(call.out, floats(chip))
    require(0 <= call.reduction <= 2, INVALID, "reduction")
    require(max(len(tensor.shape) for tensor in inputs) <= 8, INVALID, "rank")
    shape = require_broadcast(require_broadcast(call.grad.shape, call.self.shape), call.target.shape)
    require(call.out.shape == shape, INVALID, "out's shape")
    if call.self.empty or call.grad.empty or call.target.empty:
        return Answer(workspace=0)
    copy_contiguous(*inputs)
    return Answer()


def _pair(draw: Draw, least: int = 0) -> tuple[Shape, Shape]:
    shape = draw.shape(least)
    return tuple(draw.part(shape) if draw.chance(0.15) else shape for _ in range(2))


def draw_forward(draw: Draw, least: int = 0) -> Call:
    """Draw a call of aclnnMseLoss."""
    first, second = _pair(draw, least)
    dtype, reduction = draw.dtype(), draw.one((0, 1, 2))
    return Call(
        self=draw.tensor(first, dtype),
        target=draw.tensor(second, draw.dtype() if draw.chance(0.2) else dtype),
        reduction=reduction,
        out=draw.tensor(() if reduction else broadcast(first, second), draw.dtype() if draw.chance(0.2) else dtype),
    )


def draw_out(draw: Draw) -> Call:
    """Draw a call of aclnnMseLossOut."""
    call = draw_forward(draw, least=1)
    if call.reduction:
        call.out = draw.tensor(broadcast(call.self.shape, call.target.shape)[1:], call.out.dtype)
    return call


def draw_backward(draw: Draw) -> Call:
    """Draw a call of aclnnMseLossBackward."""
    first, second = _pair(draw)
    shape = broadcast(first, second)
    grad = draw.one(((), (1,), draw.part(shape), shape, shape))
    dtype = draw.dtype()
    return Call(
        grad=draw.tensor(grad, dtype),
        self=draw.tensor(first, dtype),
        target=draw.tensor(second, dtype),
        reduction=draw.one((0, 1, 2)),
        out=draw.tensor(broadcast(shape, grad), draw.dtype() if draw.chance(0.2) else dtype),
    )
