"""Sizes that must match: of optional arguments, and of functions without documented shapes."""

import torch
from tests._aclnn import Ints
from tests._rules import Function, assert_sizes_fit, assert_taken, each, t

_F, _I8, _I32, _I64, _BOOL = torch.float32, torch.int8, torch.int32, torch.int64, torch.bool
_ALL = 2147483647
_X, _ROW, _ROWS = t(4, 8), t(8), t(4, 1, dtype=_F)
_WINDOW = (0.25, 1.0, _ALL, _ALL, 4)
# query, key, value with smaller heads, and result.
_TND = t(6, 4, 16), t(9, 2, 16), t(9, 2, 8), t(6, 4, 8)
_STATISTICS = (t(2, 4, 6, 8, dtype=_F),) * 2
_PACKED_STATISTICS = (t(6, 4, 8, dtype=_F),) * 2
_ENDS = Ints([2, 6]), Ints([4, 9])
_INFERENCE = (4, 0.25, _ALL, _ALL)
_FUNCTIONS = [
    Function("aclnnAddRmsNormCast", (_X, _X, _ROW, 1e-6, t(4, 8, dtype=_F), _X, _ROWS, _X)),
    Function("aclnnInplaceAddRmsNorm", (_X, _X, _ROW, 1e-6, _ROWS)),
    Function("aclnnAddLayerNormGrad", (_X, _X, _X, _ROWS, _ROWS, _ROW, _X, _X, t(8, dtype=_F), t(8, dtype=_F))),
    Function("aclnnDeepNormGrad", (_X, _X, _X, _ROW, _ROWS, _ROWS, 0.3, _X, _X, t(8, dtype=_F), t(8, dtype=_F))),
    Function(
        "aclnnRotaryPositionEmbeddingGrad",
        (t(2, 3, 5, 16), *(t(2, 1, 5, 16),) * 2, t(2, 3, 5, 16), 0, t(2, 3, 5, 16), *(t(2, 1, 5, 16),) * 2),
    ),
    Function(
        "aclnnFlashAttentionVarLenScore",
        (*_TND[:3], *(None,) * 5, *_ENDS, *_WINDOW, "TND", 0, 0, *_PACKED_STATISTICS, None, _TND[3]),
    ),
    Function(
        "aclnnFlashAttentionUnpaddingScoreGrad",
        (
            *(*_TND, *(None,) * 4, *_PACKED_STATISTICS, None, _TND[3], None, *_ENDS),
            *(*_WINDOW, "TND", 0, 0, *_TND[:3], None),
        ),
    ),
    Function(
        "aclnnFusedInferAttentionScoreV3",
        (
            *(t(2, 6, 64), [t(8, 4, 32)], [t(8, 4, 32)], None, None, None, Ints([9, 6])),
            *(*(None,) * 7, t(2, 3, dtype=_I32), *(None,) * 12),
            *(*_INFERENCE, "BSH", 2, 0, 0, 4, 0, False, 0, 0, t(2, 6, 64), None),
        ),
        free=((14, 1),),
    ),
    Function(
        "aclnnRingAttentionUpdateV2",
        (*(t(6, 2, 32), *_STATISTICS, t(6, 2, 32), *_STATISTICS, None, "SBH", "", t(6, 2, 32), *_STATISTICS),),
    ),
    Function("aclnnAttentionUpdate", ([t(6, dtype=_F)] * 2, [t(6, 16)] * 2, 0, t(6, 16), None)),
    Function(
        "aclnnMoeTokenPermuteWithRoutingMap",
        (_X, t(4, 3, dtype=_BOOL), t(4, 3), 8, False, t(8, 8), t(8), t(8, dtype=_I32)),
    ),
    Function(
        "aclnnGatherPaKvCache",
        (
            *(t(8, 4, 2, 16), t(8, 4, 2, 8), t(2, 3, dtype=_I32), t(2, dtype=_I32), t(15, 2, 16), t(15, 2, 8)),
            *(t(2, dtype=_I32), "Norm", False),
        ),
        free=((2, 1),),
    ),
    Function(
        "aclnnCrossEntropyLossGrad",
        (t(4), _X, t(4, dtype=_I64), t(8, dtype=_F), None, None, "none", -100, 0.0, 0.0, _X),
    ),
    Function(
        "aclnnInplaceScatterUpdate",
        (t(2, 8, 4), t(2, dtype=_I64), t(2, 1, 4), 1),
        # There may be more rows than indices, and updates may cover part of the dimension.
        free=((0, 0), (0, 1), (2, 1)),
    ),
    Function(
        "aclnnDequantSwigluQuant",
        (
            *(t(4, 16, dtype=_I32), t(1, 16, dtype=_F), t(4, dtype=_F), None, t(1, 8, dtype=_F), None, None),
            *(True, "dynamic", t(4, 8, dtype=_I8), t(4, dtype=_F)),
        ),
    ),
    Function("aclnnRmsNormQuant", (_X, _ROW, _ROW, t(1), t(1, dtype=_I8), 1e-6, t(4, 8, dtype=_I8))),
    Function(
        "aclnnMoeTokenPermuteWithRoutingMapGrad",
        (t(8, 8), t(8), t(8, dtype=_I32), t(4, 3, dtype=_BOOL), 3, 4, False, _X, t(4, 3)),
    ),
    Function("aclnnMhcPost", (t(4, 2, 8), t(4, 2, 2), t(4, 8), t(4, 2), t(4, 2, 8))),
]


@each(_FUNCTIONS)
def test_sizes_have_to_fit_each_other(function):
    assert_taken(function)
    assert_sizes_fit(function)
