"""CANN's documented dtypes and shapes of norms, activations, losses and quantization."""

import ctypes

import pytest
import torch
import torch_npu
from tests._aclnn import DType, Ints, phase_one
from tests._rules import (
    Function,
    assert_dtypes_fit,
    assert_refused,
    assert_sizes_fit,
    assert_taken,
    each,
    each_refusal,
    made,
    t,
)
from tests._rules_of_attention import OF_ATTENTION

_NULL_POINTER = 161001
_F, _B = torch.float32, torch.bfloat16
_I8, _U8, _I32, _I64, _BOOL = torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool
_X, _ROW, _ROWS = t(4, 8), t(8), t(4, 1, dtype=_F)
_STEP = [ctypes.c_float(value) for value in (1e-3, 0.9, 0.99, 0.01, 1e-8)]
_FUNCTIONS = [
    Function("aclnnSwiGlu", (_X, -1, t(4, 4)), ((0, t(4, 7), "dimension -1 has 7 elements, which cannot be halved"),)),
    Function(
        "aclnnFFNV2",
        (
            *(t(4, 8, dtype=_I8), t(8, 6, dtype=_I8), t(6, 8, dtype=_I8), None, t(6, dtype=_I32), t(8, dtype=_I32)),
            *(t(1, dtype=_F), t(1, dtype=_F), t(6, dtype=_F), t(8, dtype=_F), None, None, None, None),
            *("relu", 0, False, _X),
        ),
        ((8, t(6, dtype=_I64), "deqScale1 int64, deqScale2 float32, y float16"),),
    ),
    Function(
        "aclnnROIAlign",
        (t(2, 3, 4, 5), t(7, 5), ctypes.c_float(0.25), 3, 2, 2, 0, t(7, 3, 3, 2)),
        # The size of the images.
        free=((0, 0), (0, 2), (0, 3)),
    ),
    Function("aclnnSwiGluGrad", (t(4, 4), _X, -1, _X), mixed=(0, 1, 3)),
    Function("aclnnGeluV2", (_X, 0, _X)),
    Function(
        "aclnnGeluBackwardV2",
        (_X, _X, "tanh", _X),
        # The arguments broadcast.
        free=((0, 0), (0, 1), (1, 0), (1, 1)),
        mixed=(0, 1, 3),
    ),
    Function("aclnnGelu", (_X, _X)),
    Function("aclnnFastGelu", (_X, _X), mixed=(0, 1)),
    Function("aclnnGeGluV3", (_X, -1, 0, False, t(4, 4), t(4, 4)), mixed=(0, 4, 5)),
    Function("aclnnRmsNorm", (_X, _ROW, 1e-6, _X, _ROWS), mixed=(1,)),
    Function("aclnnRmsNormGrad", (_X, _X, _ROWS, _ROW, _X, t(8, dtype=_F)), mixed=(3,)),
    Function("aclnnAddRmsNorm", (_X, _X, _ROW, 1e-6, _X, _ROWS, _X)),
    Function(
        "aclnnAddLayerNorm",
        (_X, _X, _ROW, _ROW, None, 1e-5, True, _X, _ROWS, _ROWS, _X),
        ((1, t(4, 8, dtype=_B), "these dtypes cannot be combined: x1 float16, x2 bfloat16, gamma float16"),),
    ),
    Function("aclnnDeepNorm", (_X, _X, _ROW, _ROW, 0.3, 1e-6, _ROWS, _ROWS, _X)),
    Function("aclnnGroupNormSilu", (t(2, 8, 3), _ROW, _ROW, 4, 1e-5, t(2, 8, 3), t(2, 4), t(2, 4)), mixed=(1, 2, 6, 7)),
    Function(
        "aclnnGroupNormSwish",
        (t(2, 8, 3), _ROW, _ROW, 4, "NCHW", 1e-5, True, 1.0, t(2, 8, 3), t(2, 4), t(2, 4)),
        mixed=(0, 1, 2, 8, 9, 10),
    ),
    Function(
        "aclnnCrossEntropyLoss",
        (_X, t(4, dtype=_I64), None, "mean", -100, 0.0, 0.0, False, t(1), _X, None, None),
        mixed=(1,),
    ),
    Function(
        "aclnnCrossEntropyLossGrad",
        (t(), _X, t(4, dtype=_I64), None, None, None, "mean", -100, 0.0, 0.0, _X),
        mixed=(2,),
    ),
    Function(
        "aclnnApplyAdamW",
        (_X, _X, _X, *[t(1)] * 7, _X, _X, True, False),
    ),
    Function("aclnnApplyAdamWV2", (_X, _X, _X, None, _X, t(1, dtype=_F), *_STEP, False, False), mixed=(0, 1, 2, 4, 5)),
    Function(
        "aclnnScaledMaskedSoftmax",
        (t(1, 2, 32, 64), t(1, 1, 32, 64, dtype=_BOOL), 1.0, False, t(1, 2, 32, 64)),
        # The mask broadcasts.
        free=((1, 1), (1, 2), (1, 3)),
        mixed=(0, 4),
    ),
    Function("aclnnDropoutGenMaskV2", (Ints([4, 8]), 0.5, 1, 0, DType(_F), t(16, dtype=_U8))),
    Function("aclnnDropoutDoMask", (_X, t(16, dtype=_U8), 0.5, _X), mixed=(0, 3)),
    Function("aclnnBatchNormElemt", (t(2, 8, 3), _ROW, _ROW, _ROW, _ROW, 1e-5, t(2, 8, 3)), mixed=(1, 2, 3, 4)),
    Function(
        "aclnnBatchNormStats",
        (t(2, 8, 3), 1e-5, t(8, dtype=_F), t(8, dtype=_F)),
        # The statistics are per channel.
        free=((0, 0), (0, 2)),
        mixed=(0,),
    ),
    Function(
        "aclnnBatchNormGatherStatsWithCounts",
        (t(2, 8, 3), t(4, 8), t(4, 8), None, None, 0.1, 1e-5, t(4), _ROW, _ROW),
        # The statistics are per channel.
        free=((0, 0), (0, 2)),
        mixed=(0, 1, 2, 7, 8, 9),
    ),
    Function(
        "aclnnSyncBatchNormGatherStats",
        (t(2, 8), t(2, 8), t(2, dtype=_I32), _ROW, _ROW, ctypes.c_float(0.1), ctypes.c_float(1e-5), _ROW, _ROW),
        mixed=(0, 1, 2, 3, 4, 7, 8),
    ),
    Function(
        "aclnnScatterNdUpdate",
        (_X, t(2, 1, dtype=_I64), t(2, 8)),
        # The dimension that is indexed.
        free=((0, 0),),
        mixed=(1,),
    ),
    Function(
        "aclnnMoeGatingTopK",
        (_X, _ROW, 2, 1, 1, 0, 0, 0, False, 1.0, 1e-20, t(4, 2), t(4, 2, dtype=_I32), t(4, 8, dtype=_F)),
        ((0, t(4, 2049), "x has shape [4, 2049] instead of [N, E<=2048]"),),
        # The norm, which is not requested.
        free=((13, 0), (13, 1)),
    ),
    Function(
        "aclnnMoeGatingTopKV2",
        (_X, _ROW, None, None, 2, 1, 1, 0, 0, 0, False, 1.0, 1e-20, t(4, 2), t(4, 2, dtype=_I32), t(4, 8, dtype=_F)),
        free=((15, 0), (15, 1)),
    ),
    Function(
        "aclnnTransposeBatchMatMul",
        (
            *(t(2, 4, 8), t(2, 8, 3), None, None, Ints([0, 1, 2]), Ints([0, 1, 2]), Ints([1, 0, 2])),
            *(ctypes.c_int8(0), ctypes.c_int32(1), t(4, 2, 3)),
        ),
        (
            (2, t(3), "the host NPU computes this without bias only"),
            (4, Ints([0, 2, 1]), "permX1, permX2 and permY are [0, 2, 1], [0, 1, 2] and [1, 0, 2]; CANN takes"),
            (5, Ints([0, 2, 1]), "CANN takes it with the permX1 [1, 0, 2]"),
            (6, Ints([0, 1, 2]), "permX1, permX2 and permY are [0, 1, 2], [0, 1, 2] and [0, 1, 2]; CANN takes"),
        ),
        mixed=(9,),
    ),
    Function(
        "aclnnNsaCompress",
        (t(64, 2, 16), t(32, 2), Ints([64]), "TND", 32, 16, 0, t(3, 2, 16)),
        ((5, 8, "compressStride is 8; CANN takes the multiples of 16 up to compressBlockSize, 32"),),
        # Tokens after the last sequence.
        free=((0, 0),),
    ),
    Function(
        "aclnnNsaCompressGrad",
        (t(3, 2, 16), t(64, 2, 16), t(32, 2), Ints([64]), 32, 16, 0, "TND", t(64, 2, 16), t(32, 2)),
    ),
    Function(
        "aclnnCoalesceSparse",
        (*(t(2, dtype=_I32), t(5, dtype=_I32), t(5, 3, dtype=_I32)), t(5, 4), t(2, 3, dtype=_I32), t(2, 4)),
        mixed=(0, 1, 2, 4),
    ),
    Function("aclnnDynamicQuantV2", (_X, None, None, 2, t(4, 8, dtype=_I8), t(4, dtype=_F), None), mixed=(0,)),
    *[
        Function(
            name,
            (
                *(t(4, 8, dtype=_I8), t(8, 3, dtype=_I8), None, t(3, dtype=_B)),
                *(None, None, None, None, None, False, False, 0, t(4, 3, dtype=_B)),
            ),
            ((1, t(8, 3, dtype=_I32), "the host NPU does not multiply matrices of int4, eight in each int32"),),
            # One scale may be used for all columns.
            free=((3, 0),),
            mixed=(3, 12),
        )
        for name in ("aclnnQuantMatmulV5", "aclnnQuantMatmulWeightNz")
    ],
    *[
        Function(
            name,
            (t(4, 200), 0.0, "rint", 2, 1, 128, *largest, t(4, 200, dtype=_I8), t(4, 2, dtype=_F)),
            (
                (2, "round", "roundMode is round instead of rint"),
                (3, 36, "blocks to int8 only, not to aclDataType 36"),
            ),
            mixed=(0,),
        )
        for name, largest in (("aclnnDynamicBlockQuant", ()), ("aclnnDynamicBlockQuantV2", (0.0,)))
    ],
    Function(
        "aclnnGroupedMatmulSwigluQuantWeightNZ",
        (
            *(t(4, 8, dtype=_I8), t(3, 8, 6, dtype=_I8), None, None, t(3, 6, dtype=_F), t(4, dtype=_F)),
            *(t(3, dtype=_I64), t(4, 3, dtype=_I8), t(4, dtype=_F), None),
        ),
        ((2, t(3, 6, dtype=_F), "the host NPU computes this without bias only"),),
        mixed=(4,),
    ),
    Function(
        "aclnnGroupedMatmulSwigluQuantWeightNzV2",
        (
            *(t(4, 8, dtype=_I8), [t(3, 8, 6, dtype=_I8)], [t(3, 6, dtype=_F)], [], None, t(4, dtype=_F), None),
            *(t(3, dtype=_I64), 0, 0, 0, 1, None, t(4, 3, dtype=_I8), t(4, dtype=_F)),
        ),
        ((10, 1, "dequantMode and quantMode 0 only, not 0 and 1"), (11, 2, "groupListType is 2 instead of 0 or 1")),
        mixed=(2,),
    ),
]

_FUNCTIONS += OF_ATTENTION


@each(_FUNCTIONS)
def test_a_documented_call_is_taken_with_its_sizes_and_dtypes(function):
    assert_taken(function)
    assert_sizes_fit(function)
    assert_dtypes_fit(function)


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


@pytest.mark.parametrize("position", [1, 3])
def test_a_part_of_the_heads_is_given_for_queries_and_keys(position):
    heads, part, ends, statistic = t(6, 2, 16), t(6, 2, 8), Ints([2, 6]), t(6, 2, 8, dtype=torch.float32)
    arguments = [
        *(heads, part, heads, part, heads, None, None, None, None, None, ends, ends, None, None),
        *(0.25, 1.0, 9, 9, 2, "TND", 0, 0, 1, statistic, statistic, None, heads),
    ]
    arguments[position] = None
    status, message, _ = phase_one("aclnnFlashAttentionVarLenScoreV3", *(made(each) for each in arguments))
    assert status and "queryRope and keyRope must be given" in message


def test_memory_that_is_swapped_to_the_host_is_refused_by_name():
    with pytest.raises(RuntimeError, match="does not simulate empty_with_swapped_memory"):
        torch_npu.empty_with_swapped_memory([2, 2], device=torch.device("npu"))


def test_a_refusal_is_raised_after_a_feature_that_is_not_simulated():
    assert ctypes.CDLL(None).aclrtHostRegister(None, 0, 0, None) != 0
    with pytest.raises(RuntimeError, match="dimension -1 has 7 elements, which cannot be halved"):
        torch.ops.npu.npu_swiglu(torch.ones(4, 7, device="npu"))
