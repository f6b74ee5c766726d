"""aclnnApplyFusedEmaAdam, whose C++ is generated and uses another kind of executor than the other operators.

Sources: ops-nn ``optim/apply_fused_ema_adam/op_host`` (definition and tiling); the generator of asc-devkit; opbase
``individual_op/executor/indv_executor.cpp``, ``indv_executor_tensor.cpp`` and ``format_utils.h`` (``ToAclFormat``);
ops-math ``contiguous/op_api/aclnn_contiguous.cpp``.
"""

import math

from tests.phase_one.draws import Draw
from tests.phase_one.tensors import (
    BF16,
    DHWCN,
    FLOAT,
    FLOAT16,
    INNER_NULL_POINTER,
    INT64,
    INVALID,
    NCDHW,
    NCHW,
    NCL,
    ND,
    NHWC,
    NULL_POINTER,
    TILING,
    Answer,
    Call,
    copy_contiguous,
    require,
    require_present,
)

ODD = {
    "lr": (0.0, math.nan),
    "ema_decay": (2.0, -1.0),
    "beta1": (1.0, 2.0),
    "beta2": (1.0, math.inf),
    "eps": (0.0, -1.0),
    "mode": (-1, 0, 1, 2),
    "bias_correction": (False, True),
    "weight_decay": (0.0, -1.0),
}

_LIBRARY = 16 * 1024 * 1024


def ema_adam(call: Call, chip: str) -> Answer:
    """The step of the optimizer."""
    # The executor is created first, and does not exist for these chips.
    require(chip not in ("Ascend910", "Ascend310P"), NULL_POINTER, "chip")
    states = (call.var, call.m, call.v, call.s)
    tensors = (call.grad, *states, call.step)
    require_present(tensors)
    require(call.executor, NULL_POINTER, "null executor")
    if not call.workspace_size:
        # The generated code treats this refusal as a cache hit.
        return Answer()
    # Strided tensors are copied before anything else is checked, also in a private format.
    copies = [tensor for tensor in tensors if not tensor.dense]
    copy_contiguous(*copies)
    like_nd = (ND, NCL, NCHW, NHWC, NCDHW, DHWCN)
    require(all(tensor.storage_format in like_nd for tensor in tensors), INVALID, "format")
    dtypes = {tensor.dtype for tensor in (call.grad, *states)}
    require(len(dtypes) == 1 and dtypes <= {FLOAT, FLOAT16, BF16}, INVALID, "dtype")
    require(call.step.dtype == INT64, INVALID, "step's dtype")
    if all(state.empty for state in states):
        return Answer(workspace=0 if not copies else None)
    require(all(state.shape == call.grad.shape for state in states), TILING, "shapes differ")
    # The copies back are described by an aclFormat, which has no name for this format.
    nameless = any(state.format == DHWCN and not state.dense for state in states)
    require(not nameless, INNER_NULL_POINTER, "strided DHWCN")
    return Answer(workspace=_LIBRARY if not copies else None)


def draw_step(draw: Draw) -> Call:
    """Draw a call of aclnnApplyFusedEmaAdam."""
    shape = draw.shape()
    dtype = draw.one((FLOAT, FLOAT16, BF16))
    like_nd = (ND, ND, ND, NCL, NCHW, NHWC, NCDHW, DHWCN)
    tensors = [draw.tensor(shape, dtype, draw.one(like_nd)) for _ in range(5)]
    return Call(
        grad=tensors[0],
        var=tensors[1],
        m=tensors[2],
        v=tensors[3],
        s=tensors[4],
        step=draw.tensor(draw.one(((1,), (1,), (), (2, 2))), INT64, ND),
        lr=0.001,
        ema_decay=0.5,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        mode=draw.one((0, 1)),
        bias_correction=draw.chance(0.5),
        weight_decay=0.01,
    )
