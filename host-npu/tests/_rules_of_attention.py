"""CANN's documented dtypes and shapes of attention, rotations, experts and caches, for test_rules.py."""

import ctypes

import torch
from tests._aclnn import Ints
from tests._rules import Function, t

_F, _B = torch.float32, torch.bfloat16
_I32, _I64, _BOOL = torch.int32, torch.int64, torch.bool
_ALL = 2147483647
_X = t(4, 8)
_ATTENTION = (t(2, 4, 6, 16),) * 3
_STATISTICS = (t(2, 4, 6, 8, dtype=_F),) * 2
_WINDOW = (0.25, 1.0, _ALL, _ALL, 4)
_MASK = t(2, 4, 6, 9, dtype=_BOOL)
# query, key, value with smaller heads, and result.
_BSND = t(2, 6, 4, 16), t(2, 9, 2, 16), t(2, 9, 2, 8), t(2, 6, 4, 8)
_BSH = t(2, 6, 64), t(2, 9, 32), t(2, 9, 16), t(2, 6, 32)
OF_ATTENTION = [
    Function("aclnnRotaryPositionEmbedding", (t(2, 3, 5, 16), t(1, 1, 5, 16), t(1, 1, 5, 16), 0, t(2, 3, 5, 16))),
    Function(
        "aclnnRotaryPositionEmbeddingGrad",
        (t(2, 3, 5, 16), t(1, 1, 5, 16), t(1, 1, 5, 16), None, 0, t(2, 3, 5, 16), t(1, 1, 5, 16), t(1, 1, 5, 16)),
        # Without x, the gradients of cos and sin are not written.
        free=((6, 0), (6, 2), (7, 0), (7, 2)),
        mixed=(5, 6, 7),
    ),
    Function(
        "aclnnApplyRotaryPosEmbV2",
        (t(2, 5, 4, 128), t(2, 5, 2, 128), t(2, 5, 1, 128), t(2, 5, 1, 128), 1, "half"),
        (
            (4, 2, "layout is SBND; CANN takes BSND and TND on this chip"),
            (5, "quarter", "rotaryMode is quarter; CANN takes half on this chip"),
        ),
        # The number of heads.
        free=((0, 2), (1, 2)),
    ),
    Function("aclnnInterleaveRope", (t(2, 3, 5, 64), t(2, 1, 5, 64), t(2, 1, 5, 64), t(2, 3, 5, 64)), mixed=(3,)),
    Function(
        "aclnnRopeWithSinCosCacheV2",
        (t(3, dtype=_I64), t(3, 128), t(3, 64), t(9, 64), None, 64, True, 0, t(3, 128), t(3, 64)),
        ((5, 24, "head_size is 24"),),
        # The number of positions in the cache.
        free=((3, 0),),
        mixed=(8, 9),
    ),
    Function(
        "aclnnMoeGatingTopKSoftmax",
        (_X, None, 2, t(4, 2), t(4, 2, dtype=_I32), t(4, 2, dtype=_I32)),
        # The number of experts.
        free=((0, 1),),
    ),
    Function(
        "aclnnInplaceQuantScatter",
        (
            *(t(2, 8, 32, dtype=torch.int8), t(2, dtype=_I64), t(2, 1, 32), t(1, 1, 32, dtype=torch.float32)),
            *(t(1, 1, 32, dtype=_I32), -2, -1, 1),
        ),
        ((5, 1, "axis, quantAxis and reduction are 1, -1 and 1; CANN takes -2"),),
        # There may be more rows than indices, updates may cover part of the dimension, and scales are flattened.
        free=((0, 0), (0, 1), (2, 1)),
        mixed=(1,),
    ),
    Function(
        "aclnnMoeUpdateExpert",
        (
            *(t(4, 2, dtype=_I32), t(9, 3, dtype=_I32), t(4, 2), t(2, dtype=torch.float32), t(4, dtype=torch.bool)),
            *(0, 2, 0, t(4, 2, dtype=_I32), t(4, 2, dtype=torch.bool)),
        ),
        ((6, 1, "localRankId is 0 of 1 ranks"), (7, 2, "balanceMode is 2 instead of 0 or 1")),
        # The table may have any number of experts and instances.
        free=((1, 0), (1, 1)),
        mixed=(2,),
    ),
    Function(
        "aclnnMoeInitRouting",
        (_X, t(4, 2, dtype=_I32), t(4, 2, dtype=_I32), 4, t(8, 8), t(8, dtype=_I32), t(8, dtype=_I32)),
        mixed=(0, 4),
    ),
    Function("aclnnMoeTokenPermute", (_X, t(4, 2, dtype=_I64), 0, False, t(8, 8), t(8, dtype=_I32)), mixed=(1,)),
    Function(
        "aclnnMoeTokenPermuteGrad",
        (t(8, 8), t(8, dtype=_I32), 2, False, _X),
        # Copies of tokens may have been dropped.
        free=((0, 0),),
        mixed=(0, 4),
    ),
    Function(
        "aclnnMoeTokenUnpermute",
        (t(8, 8), t(8, dtype=_I32), t(4, 2), False, None, _X),
        # Copies of tokens may have been dropped.
        free=((0, 0),),
        mixed=(2,),
    ),
    Function(
        "aclnnMoeTokenUnpermuteGrad",
        (t(8, 8), _X, t(8, dtype=_I32), t(4, 2), False, None, t(8, 8), t(4, 2)),
        mixed=(0, 1, 3, 6, 7),
    ),
    Function(
        "aclnnMoeFinalizeRouting",
        (t(8, 8), _X, _X, t(3, 8), t(4, 2), t(8, dtype=_I32), t(4, 2, dtype=_I32), _X),
        # The number of rows of experts, and of experts.
        free=((0, 0), (3, 0)),
    ),
    Function(
        "aclnnMoeFinalizeRoutingV2",
        (t(8, 8), t(8, dtype=_I32), None, None, None, t(4, 2), None, 0, _X),
        # The number of rows of experts.
        free=((0, 0),),
        mixed=(5,),
    ),
    Function(
        "aclnnMoeReRouting",
        (_X, t(2, 3, dtype=_I32), None, 1, 0, _X, None, t(4, dtype=_I32), t(3, dtype=_I32)),
        # The number of ranks.
        free=((1, 0),),
        mixed=(0, 5),
    ),
    Function(
        "aclnnFlashAttentionScore",
        (*_BSND[:3], t(2, 4, 6, 9), None, None, _MASK, None, *_WINDOW, "BSND", 0, 0, *_STATISTICS, None, _BSND[3]),
        (
            (6, t(6, 6, dtype=_I32), "attenMaskOptional has dtype int32 instead of uint8 or bool"),
            (0, t(6, 16), "query has shape [6, 16] instead of [*, *, *] or [*, *, *, *]"),
            (2, t(2, 9, 2, 32), "the heads of queries, keys and values have 16, 16 and 32 elements"),
        ),
        # pse and the mask broadcast.
        free=((3, 0), (3, 1), (3, 2), (3, 3), (6, 0), (6, 1)),
        mixed=(6, 19),
    ),
    Function(
        "aclnnFlashAttentionScoreGrad",
        (
            *(*_BSH, None, None, None, _MASK, *_STATISTICS, None, _BSH[3], None),
            *(*_WINDOW, "BSH", 0, 0, *_BSH[:3], None),
        ),
        free=((7, 0), (7, 1)),
        mixed=(7, 11, 21, 22, 23),
    ),
    Function(
        "aclnnFusedInferAttentionScoreV3",
        (
            *(t(2, 4, 6, 16), [t(2, 2, 9, 16)], [t(2, 2, 9, 16)], t(2, 4, 6, 9), t(2, 1, 6, 9, dtype=_BOOL)),
            *(*(None,) * 19, t(2, 4, 6, 64), t(2, 2, 9, 64), None),
            *(4, 0.25, _ALL, _ALL, "BNSD", 2, 0, 0, 0, 0, True, 0, 0, t(2, 4, 6, 16), t(2, 4, 6, 1, dtype=_F)),
        ),
        # pse and the mask may have more rows and columns, and one batch for all.
        free=((3, 0), (3, 2), (3, 3), (4, 0), (4, 2), (4, 3)),
        mixed=(3, 4, 40),
    ),
    Function(
        "aclnnPromptFlashAttentionV3",
        (*_ATTENTION, *(None,) * 9, 4, 0.25, _ALL, _ALL, "BNSD", 0, 0, 0, _ATTENTION[0]),
        mixed=(20,),
    ),
    Function(
        "aclnnIncreFlashAttentionV4",
        (t(2, 4, 1, 16), [_ATTENTION[1]], [_ATTENTION[2]], *(None,) * 12, 4, 0.25, "BNSD", 0, 0, 0, t(2, 4, 1, 16)),
        mixed=(21,),
    ),
    *[
        Function(
            f"aclnnGroupedMatmul{version}",
            (
                [_X],
                [t(2, 8, 3)],
                [t(2, 3)],
                *(None,) * 5,
                t(2, dtype=_I64),
                *(None,) * 3,
                3,
                0,
                0,
                0,
                *more,
                [t(4, 3)],
                None,
                None,
            ),
            (
                (2, [t(2, 3, dtype=_B)], "biasOptional has dtype bfloat16 instead of float32, float16 or int32"),
                (1, [t(2, 7, 3)], "x of shape [4, 8] cannot be multiplied with matrices of shape [7, 3]"),
                (0, [_X] * 129, "x, weight and out are lists of 129, 1 and 1 tensors; CANN takes at most 128"),
            ),
        )
        for version, more in (("V4", ()), ("V5", (None,)), ("WeightNz", (None, 0)))
    ],
    Function(
        "aclnnQuantMatmulReduceSumWeightNz",
        (
            *(t(2, 4, 8, dtype=torch.int8), t(2, 8, 3, dtype=torch.int8), t(2, 4, dtype=_F), t(3, dtype=_B)),
            *(None, None, None, None, None, False, False, 0, Ints([0]), False, t(4, 3, dtype=_B)),
        ),
        ((9, True, "CANN takes neither transposeX1, transposeX2 nor keepDims"),),
    ),
    Function(
        "aclnnGatherV3",
        (_X, 0, t(5, dtype=_I64), 0, 0, t(5, 8)),
        ((3, 1, "the host NPU has batchDims 0 only, not 1"), (4, 2, "mode is 2 instead of 0 or 1")),
        # The dimension that is indexed.
        free=((0, 0),),
        mixed=(2,),
    ),
    Function(
        "aclnnGroupedMatmulFinalizeRoutingWeightNzV2",
        (
            *(t(4, 8, dtype=torch.int8), t(2, 8, 3, dtype=torch.int8), t(2, 3, dtype=_F), None, None, None, None),
            *(t(4, dtype=_F), t(2, dtype=_I64), t(2, 3, dtype=_B), t(4, dtype=_F), t(4, dtype=_I64), 0),
            *(ctypes.c_float(1), 3, False, False, 1, None, t(5, 3, dtype=_F)),
        ),
        (
            (12, 1, "dtype is 1; CANN takes 0, float32"),
            (14, 4, "sharedInput has 2 rows from 4 on of 5"),
            (15, True, "transposeX1 and transposeX2 must be false"),
            (17, 2, "groupListType is 2 instead of 0 or 1"),
            (3, t(2, 3, dtype=_F), "the host NPU computes this without bias only"),
        ),
        # The rows of the result, which include those of shared.
        free=((9, 0), (19, 0)),
        mixed=(11,),
    ),
    Function(
        "aclnnScatterPaKvCache",
        (
            *(t(3, 2, 16), t(4, 8, 2, 16), t(3, dtype=_I32), t(3, 2, 16), t(4, 8, 2, 16)),
            *(None, None, None, "Norm", "None", None, None),
        ),
        mixed=(2,),
    ),
]
