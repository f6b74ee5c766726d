"""aclnnBinaryCrossEntropy and aclnnBinaryCrossEntropyBackward.

Sources: ops-nn ``loss/binary_cross_entropy/op_api/aclnn_binary_cross_entropy.cpp``, its
``op_host/arch35/binary_cross_entropy_tiling_arch35.cpp``,
``loss/binary_cross_entropy_grad/op_api/aclnn_binary_cross_entropy_backward.cpp``; opbase ``common_types.cpp``, where a
caller's tensor has its storage's shape as its original shape; ops-math ``trans_data`` (``ReFormat``).
"""

from tests.phase_one.draws import Draw
from tests.phase_one.tensors import (
    DHWCN,
    FRACTAL_Z,
    FRACTAL_Z_3D,
    FRACTAL_Z_C04,
    HWCN,
    INNER_NULL_POINTER,
    INVALID,
    NC1HWC0,
    NC1HWC0_C04,
    NCDHW,
    NCHW,
    NCL,
    NDC1HWC0,
    NDHWC,
    NHWC,
    NO_FORMAT,
    Answer,
    Call,
    Refused,
    Tensor,
    Undefined,
    copy_contiguous,
    copy_view,
    floats,
    require,
    require_broadcast,
    require_dtype,
    require_present,
    require_results,
    same_shape,
)

ODD = {"reduction": (-1, 0, 1, 2, 3, 2**40)}

# The ranks that formats imply.
_RANKS = {NCL: 3} | dict.fromkeys((NCHW, NHWC, HWCN, FRACTAL_Z, FRACTAL_Z_3D, FRACTAL_Z_C04), 4)
_RANKS |= dict.fromkeys((NC1HWC0, NC1HWC0_C04, NCDHW, NDHWC, DHWCN), 5) | {NDC1HWC0: 6}


def binary_cross_entropy(call: Call, chip: str) -> Answer:
    """The loss. Nothing is cast, and null tensors have another status than elsewhere."""
    require_results(call)
    weight, out = call.weight, call.out
    require_present((call.self, call.target, out), INNER_NULL_POINTER)
    for tensor in (call.self, call.target, out, weight):
        if tensor is not None:
            require_dtype(tensor, floats(chip))
    if weight is not None:
        same = call.self.dtype == call.target.dtype == weight.dtype == out.dtype
        require(same, INVALID, "dtypes differ")
    require(call.self.shape == call.target.shape, INVALID, "target's shape")
    require(0 <= call.reduction <= 2, INVALID, "reduction")
    if call.self.empty:
        return _fill(call)
    copy_contiguous(call.self, call.target, weight)
    require(call.self.dtype == call.target.dtype, INNER_NULL_POINTER, "no kernel for two dtypes")
    if weight is not None and weight.shape != call.self.shape:
        if chip != "Ascend950":
            raise Undefined(
                "BinaryCrossEntropy with a weight of another shape: a closed-source kernel, except on the 950"
            )
        # The tiling treats a scalar as one element.
        scalars = (weight.shape or (1,)) == (call.self.shape or (1,))
        require(scalars, INNER_NULL_POINTER, "weight's shape")
    # From the tiling of the reduction.
    too_many = chip == "Ascend950" and call.reduction != 0 and len(call.self.shape) > 8
    require(not too_many, INNER_NULL_POINTER, "rank")
    result = () if call.reduction else call.self.shape
    require(same_shape(result, out.shape), INVALID, "out's shape")
    copy_view(result, call.self.dtype, out)
    return Answer()


def _fill(call: Call) -> Answer:
    """All of out's storage is filled, and out becomes a view of all of it, even if the call is then refused."""
    views = {"out": call.out.storage}
    try:
        copy_view(call.out.storage, call.self.dtype, call.out.but(shape=call.out.storage))
    except Refused as refused:
        refused.views = views
        raise
    return Answer(views=views)


def binary_cross_entropy_backward(call: Call, chip: str) -> Answer:
    """The gradient. All tensors are cast."""
    require_results(call)
    self, weight, out = call.self, call.weight, call.out
    require_present((call.grad, self, call.target, out))
    # A template checks only out.
    require(len(out.shape) <= 8, INVALID, "rank")
    for tensor in (self, call.grad, call.target, out, weight):
        if tensor is not None:
            require_dtype(tensor, floats(chip))
    for tensor in (call.target, weight):
        require(tensor is None or _byte(tensor) == _byte(self), INVALID, "formats differ")
    if not self.empty:
        require(out.shape == self.shape, INVALID, "out's shape")
        for tensor in (call.target, weight, call.grad):
            if tensor is not None and require_broadcast(self.shape, tensor.shape) != self.shape:
                raise Refused(INVALID, "broadcast larger than self", logged=False)
    require(0 <= call.reduction <= 2, INVALID, "reduction")
    if self.empty:
        return Answer(workspace=0)
    copy_contiguous(call.grad, self, call.target, weight)
    _reformat(out)
    return Answer()


def _byte(tensor: Tensor) -> int:
    """Return the format as CANN stores it, in 8 bits: NO_FORMAT, -1, is 255."""
    return 0xFF if tensor.storage_format == NO_FORMAT else tensor.storage_format


def _reformat(out: Tensor) -> None:
    if out.format == NO_FORMAT:
        raise Undefined("BinaryCrossEntropyBackward reads outside of a table if out has format -1")
    rank = _RANKS.get(out.format, len(out.shape))
    require(rank == len(out.shape), INNER_NULL_POINTER, "format's rank")


def draw_forward(draw: Draw) -> Call:
    """Draw a call of aclnnBinaryCrossEntropy."""
    shape, dtype, reduction = draw.shape(), draw.dtype(), draw.one((0, 1, 2))
    shape = (1,) * (9 - len(shape)) + shape if draw.chance(0.05) else shape
    weight = None if draw.chance(0.5) else draw.tensor(draw.part(shape) if draw.chance(0.1) else shape, dtype)
    out = shape if reduction == 0 else draw.one(((), (), (1,), (1, 1)))
    return Call(
        self=draw.tensor(shape, dtype),
        target=draw.tensor(shape, dtype),
        weight=weight,
        reduction=reduction,
        out=draw.tensor(out, dtype),
    )


def draw_backward(draw: Draw) -> Call:
    """Draw a call of aclnnBinaryCrossEntropyBackward."""
    shape, format = draw.shape(), draw.format()
    like = [draw.part(shape) if draw.chance(0.2) else shape for _ in range(3)]
    weight = None if draw.chance(0.4) else draw.tensor(like[2], draw.dtype(), format)
    return Call(
        grad=draw.tensor(like[0], draw.dtype()),
        self=draw.tensor(shape, draw.dtype(), format),
        target=draw.tensor(like[1], draw.dtype(), format),
        weight=weight,
        reduction=draw.one((0, 1, 2)),
        out=draw.tensor(shape, draw.dtype(), draw.format()),
    )
