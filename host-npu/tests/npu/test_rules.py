"""CANN's documented dtypes and shapes of norms, activations, losses and quantization."""

import ctypes

import pytest
import torch
import torch_npu
from tests._aclnn import DType, Ints, phase_one
from tests._rules import Function, assert_refused, assert_sizes_fit, assert_taken, each, each_refusal, made, t

_NULL_POINTER = 161001
_F, _H, _B = torch.float32, torch.float16, torch.bfloat16
_I8, _U8, _I32, _I64, _BOOL = torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool
_FLOATS = "instead of float32, float16 or bfloat16"
_X, _ROW, _ROWS = t(4, 8), t(8), t(4, 1, dtype=_F)
_STEP = [ctypes.c_float(value) for value in (1e-3, 0.9, 0.99, 0.01, 1e-8)]
_FUNCTIONS = [
    Function(
        "aclnnSwiGlu",
        (_X, -1, t(4, 4)),
        (
            (0, t(4, 8, dtype=_I32), f"x has dtype int32 {_FLOATS}"),
            (2, t(4, 4, dtype=_F), "out has dtype float32 instead of x's float16"),
            (0, t(), "x has shape [] instead of [*, ...]"),
            (0, t(4, 7), "dimension -1 has 7 elements, which cannot be halved"),
        ),
    ),
    Function(
        "aclnnSwiGluGrad",
        (t(4, 4), _X, -1, _X),
        (
            (0, t(4, 4, dtype=_I64), f"yGrad has dtype int64 {_FLOATS}"),
            (3, t(8, 4), "out has shape [8, 4] instead of [4, 8]"),
        ),
    ),
    Function(
        "aclnnGeluV2",
        (_X, 0, _X),
        (
            (2, t(4, 8, dtype=_B), "y has dtype bfloat16 instead of x's float16"),
            (2, t(8, 4), "y has shape [8, 4] instead of [4, 8]"),
        ),
    ),
    Function(
        "aclnnGeluBackwardV2",
        (_X, _X, "tanh", _X),
        ((1, t(4, 8, dtype=_BOOL), f"self has dtype bool {_FLOATS}"), (0, t(4, 7), "broadcast")),
        # They are broadcast.
        free=((0, 0), (0, 1), (1, 0), (1, 1)),
    ),
    Function(
        "aclnnGelu",
        (_X, _X),
        (
            (1, t(4, 8, dtype=_F), "out has dtype float32 instead of self's float16"),
            (1, t(4, 7), "out has shape [4, 7] instead of [4, 8]"),
        ),
    ),
    Function(
        "aclnnFastGelu",
        (_X, _X),
        ((0, t(4, 8, dtype=_I8), f"self has dtype int8 {_FLOATS}"), (1, t(4, 7), "out has shape [4, 7]")),
    ),
    Function(
        "aclnnGeGluV3",
        (_X, -1, 0, False, t(4, 4), t(4, 4)),
        (
            (4, t(4, 4, dtype=_I32), f"out has dtype int32 {_FLOATS}"),
            (5, t(4, 8), "outGelu has shape [4, 8] instead of [4, 4]"),
        ),
    ),
    Function(
        "aclnnRmsNorm",
        (_X, _ROW, 1e-6, _X, _ROWS),
        (
            (1, t(8, dtype=_B), "gamma has dtype bfloat16 instead of x's float16 or float32"),
            (4, t(4, 1), "rstdOut has dtype float16 instead of float32"),
            (1, t(7), "gamma has shape [7], which is not the end of x's [4, 8]"),
        ),
    ),
    Function(
        "aclnnRmsNormGrad",
        (_X, _X, _ROWS, _ROW, _X, t(8, dtype=_F)),
        (
            (2, t(4, 1), "rstd has dtype float16 instead of float32"),
            (1, t(8, 8), "x has shape [8, 8] instead of [A, B], where A is 4 and B is 8"),
        ),
    ),
    Function(
        "aclnnAddRmsNorm",
        (_X, _X, _ROW, 1e-6, _X, _ROWS, _X),
        (
            (2, t(8, dtype=_F), "gamma has dtype float32 instead of x1's float16"),
            (1, t(1, 8), "x2 has shape [1, 8] instead of [A, 8], where A is 4"),
        ),
    ),
    Function(
        "aclnnAddLayerNorm",
        (_X, _X, _ROW, _ROW, None, 1e-5, True, _X, _ROWS, _ROWS, _X),
        (
            (1, t(4, 8, dtype=_B), "these dtypes cannot be combined: x1 float16, x2 bfloat16, gamma float16"),
            (3, t(8, dtype=_F), "beta has dtype float32 instead of gamma's float16"),
            (4, t(3), "biasOptional has shape [3]"),
        ),
    ),
    Function(
        "aclnnDeepNorm",
        (_X, _X, _ROW, _ROW, 0.3, 1e-6, _ROWS, _ROWS, _X),
        (
            (2, t(8, dtype=_F), "beta has dtype float32 instead of x's float16"),
            (0, t(8), "x has shape [8] instead of [A, B, ...]"),
        ),
    ),
    Function(
        "aclnnGroupNormSilu",
        (t(2, 8, 3), _ROW, _ROW, 4, 1e-5, t(2, 8, 3), t(2, 4), t(2, 4)),
        (
            (1, t(8, dtype=_I32), "gamma has dtype int32 instead of self's float16 or float32"),
            (0, t(2, 8, 3, dtype=_F), "gamma has dtype float16 instead of self's float32"),
            (2, t(3), "beta has shape [3] instead of [C], where C is 8"),
        ),
    ),
    Function(
        "aclnnGroupNormSwish",
        (t(2, 8, 3), _ROW, _ROW, 4, "NCHW", 1e-5, True, 1.0, t(2, 8, 3), t(2, 4), t(2, 4)),
        (
            (0, t(2, 8, 3, dtype=_I32), f"x has dtype int32 {_FLOATS}"),
            (1, t(3), "gamma has shape [3] instead of [C], where C is 8"),
        ),
    ),
    Function(
        "aclnnCrossEntropyLoss",
        (_X, t(4, dtype=_I64), None, "mean", -100, 0.0, 0.0, False, t(1), _X, None, None),
        (
            (1, t(4, dtype=_H), "target has dtype float16 instead of int32 or int64"),
            (2, t(8), "weightOptional has dtype float16 instead of float32"),
            (1, t(3, dtype=_I64), "target has shape [3] instead of [N], where N is 4"),
        ),
    ),
    Function(
        "aclnnCrossEntropyLossGrad",
        (t(), _X, t(4, dtype=_I64), None, None, None, "mean", -100, 0.0, 0.0, _X),
        (
            (1, t(4, 8, dtype=_F), "logProb has dtype float32 instead of gradLoss's float16"),
            (2, t(8, dtype=_I64), "target has shape [8] instead of [N], where N is 4"),
        ),
    ),
    Function(
        "aclnnApplyAdamWV2",
        (_X, _X, _X, None, _X, t(1, dtype=_F), *_STEP, False, False),
        (
            (5, t(1, dtype=_I32), "step has dtype int32 instead of float32 or int64"),
            (4, t(8, 4), "grad has shape [8, 4] instead of [4, 8]"),
        ),
    ),
    Function(
        "aclnnScaledMaskedSoftmax",
        (t(1, 2, 32, 64), t(1, 1, 32, 64, dtype=_BOOL), 1.0, False, t(1, 2, 32, 64)),
        (
            (1, t(1, 1, 32, 64, dtype=_U8), "mask has dtype uint8 instead of bool"),
            (0, t(1, 2, 32, 33), "x has shape [1, 2, 32, 33] instead of [N, C, H%32<=4096, W%32<=4096]"),
        ),
        # The mask is broadcast.
        free=((1, 1), (1, 2), (1, 3)),
    ),
    Function(
        "aclnnDropoutGenMaskV2",
        (Ints([4, 8]), 0.5, 1, 0, DType(_F), t(16, dtype=_U8)),
        (
            (5, t(16, dtype=_BOOL), "out has dtype bool instead of uint8"),
            (5, t(4, 4, dtype=_U8), "out has shape [4, 4] instead of [*]"),
        ),
    ),
    Function(
        "aclnnDropoutDoMask",
        (_X, t(16, dtype=_U8), 0.5, _X),
        (
            (1, t(16, dtype=_I32), "mask has dtype int32 instead of uint8"),
            (3, t(8, 4), "out has shape [8, 4] instead of [4, 8]"),
        ),
    ),
    Function(
        "aclnnBatchNormElemt",
        (t(2, 8, 3), _ROW, _ROW, _ROW, _ROW, 1e-5, t(2, 8, 3)),
        (
            (3, t(8, dtype=_F), "mean has dtype float32 instead of input's float16"),
            (4, t(3), "invstd has shape [3] instead of [C], where C is 8"),
        ),
    ),
    Function(
        "aclnnBatchNormStats",
        (t(2, 8, 3), 1e-5, t(8, dtype=_F), t(8, dtype=_F)),
        (
            (0, t(8), "input has shape [8] instead of [N, C, ...]"),
            (2, _ROW, "mean has dtype float16 instead of float32"),
        ),
        # The statistics are those of channels.
        free=((0, 0), (0, 2)),
    ),
    Function(
        "aclnnBatchNormGatherStatsWithCounts",
        (t(2, 8, 3), t(4, 8), t(4, 8), None, None, 0.1, 1e-5, t(4), _ROW, _ROW),
        (
            (7, t(4, dtype=_I32), f"counts has dtype int32 {_FLOATS}"),
            (7, t(2), "counts has shape [2] instead of [R], where R is 4"),
        ),
        # The statistics are those of channels.
        free=((0, 0), (0, 2)),
    ),
    Function(
        "aclnnSyncBatchNormGatherStats",
        (t(2, 8), t(2, 8), t(2, dtype=_I32), _ROW, _ROW, ctypes.c_float(0.1), ctypes.c_float(1e-5), _ROW, _ROW),
        (
            (0, t(2, 8, dtype=_I32), f"totalSum has dtype int32 {_FLOATS}"),
            (2, t(3, dtype=_I32), "sampleCount has shape [3] instead of [R], where R is 2"),
        ),
    ),
    Function(
        "aclnnScatterNdUpdate",
        (_X, t(2, 1, dtype=_I64), t(2, 8)),
        (
            (2, t(2, 8, dtype=_F), "updates has dtype float32 instead of varRef's float16"),
            (1, t(2, dtype=_I64), "indices has shape [2] instead of [*, ..., *]"),
        ),
        # What the indices are places of.
        free=((0, 0),),
    ),
    Function(
        "aclnnCoalesceSparse",
        (*(t(2, dtype=_I32), t(5, dtype=_I32), t(5, 3, dtype=_I32)), t(5, 4), t(2, 3, dtype=_I32), t(2, 4)),
        (
            (3, t(5, 4, dtype=_B), "values has dtype bfloat16 instead of float32, float16 or int32"),
            (5, t(2, 4, dtype=_F), "newValues has dtype float32 instead of values's float16"),
            (4, t(2, 2, dtype=_I32), "newIndices has shape [2, 2] instead of [U, M], where M is 3 and U is 2"),
        ),
    ),
    Function(
        "aclnnDynamicQuantV2",
        (_X, None, None, 2, t(4, 8, dtype=_I8), t(4, dtype=_F), None),
        (
            (0, t(4, 8, dtype=_F), "x has dtype float32 instead of float16 or bfloat16"),
            (0, _ROW, "x has shape [8] instead of [*, *, ...]"),
        ),
    ),
    *[
        Function(
            name,
            (
                *(t(4, 8, dtype=_I8), t(8, 3, dtype=_I8), None, t(3, dtype=_B)),
                *(None, None, None, None, None, False, False, 0, t(4, 3, dtype=_B)),
            ),
            (
                (3, t(3), "x2Scale has dtype float16 instead of float32, bfloat16, int64 or uint64"),
                (6, t(3, dtype=_F), "x2Offset is that of an int8 result, but out has dtype bfloat16"),
                (12, t(4, 3, dtype=_F), "out has dtype float32 instead of float16, bfloat16, int8 or int32"),
                (0, t(8, dtype=_I8), "x1 has shape [8] instead of [*, *, ...]"),
                (1, t(8, 3, dtype=_I32), "the host NPU does not multiply matrices of int4, eight in each int32"),
            ),
            # One scale may be that of all columns.
            free=((3, 0),),
        )
        for name in ("aclnnQuantMatmulV5", "aclnnQuantMatmulWeightNz")
    ],
    *[
        Function(
            name,
            (t(4, 200), 0.0, "rint", 2, 1, 128, *largest, t(4, 200, dtype=_I8), t(4, 2, dtype=_F)),
            (
                (0, t(4, 200, dtype=_I32), f"x has dtype int32 {_FLOATS}"),
                (0, t(200), "x has shape [200] instead of [M, N] or [B, M, N]"),
                (2, "round", "roundMode is round instead of rint"),
                (3, 36, "blocks to int8 only, not to aclDataType 36"),
            ),
        )
        for name, largest in (("aclnnDynamicBlockQuant", ()), ("aclnnDynamicBlockQuantV2", (0.0,)))
    ],
    Function(
        "aclnnGroupedMatmulSwigluQuantWeightNZ",
        (
            *(t(4, 8, dtype=_I8), t(3, 8, 6, dtype=_I8), None, None, t(3, 6, dtype=_F), t(4, dtype=_F)),
            *(t(3, dtype=_I64), t(4, 3, dtype=_I8), t(4, dtype=_F), None),
        ),
        (
            (1, t(3, 8, 6), "weight has dtype float16 instead of int8"),
            (4, t(3, 6, dtype=_I64), f"weightScale has dtype int64 {_FLOATS}"),
            (2, t(3, 6, dtype=_F), "the host NPU computes this without bias only"),
            (6, t(3, dtype=_I32), "groupList has dtype int32 instead of int64"),
        ),
    ),
    Function(
        "aclnnGroupedMatmulSwigluQuantWeightNzV2",
        (
            *(t(4, 8, dtype=_I8), [t(3, 8, 6, dtype=_I8)], [t(3, 6, dtype=_F)], [], None, t(4, dtype=_F), None),
            *(t(3, dtype=_I64), 0, 0, 0, 1, None, t(4, 3, dtype=_I8), t(4, dtype=_F)),
        ),
        (
            (2, [t(3, 5, dtype=_F)], "weightScale has shape [3, 5] instead of [E, N], where E is 3 and N is 6"),
            (10, 1, "dequantMode and quantMode 0 only, not 0 and 1"),
            (11, 2, "groupListType is 2 instead of 0 or 1"),
        ),
    ),
]


@each(_FUNCTIONS)
def test_a_documented_call_is_taken(function):
    assert_taken(function)


@each(_FUNCTIONS)
def test_sizes_have_to_fit_each_other(function):
    assert_sizes_fit(function)


@each_refusal(_FUNCTIONS)
def test_what_the_documents_do_not_take_is_refused(function, position, argument, sentence):
    assert_refused(function, position, argument, sentence)


@pytest.mark.parametrize(("position", "name"), [(0, "x"), (1, "gamma"), (3, "yOut"), (4, "rstdOut")])
def test_a_null_pointer_is_refused_by_the_name_of_the_argument(position, name):
    arguments = [made(value) for value in (_X, _ROW, 1e-6, _X, _ROWS)]
    arguments[position] = None
    status, message, _ = phase_one("aclnnRmsNorm", *arguments)
    assert status == _NULL_POINTER
    assert f"{name} is a null pointer" in message


def test_memory_that_is_swapped_to_the_host_is_refused_by_name():
    with pytest.raises(RuntimeError, match="does not simulate empty_with_swapped_memory"):
        torch_npu.empty_with_swapped_memory([2, 2], device=torch.device("npu"))


def test_a_refusal_is_raised_after_a_feature_that_is_not_simulated():
    assert ctypes.CDLL(None).aclrtHostRegister(None, 0, 0, None) != 0
    with pytest.raises(RuntimeError, match="dimension -1 has 7 elements, which cannot be halved"):
        torch.ops.npu.npu_swiglu(torch.ones(4, 7, device="npu"))
