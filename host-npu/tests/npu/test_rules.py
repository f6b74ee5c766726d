"""CANN's documented dtypes and shapes of functions that are formulas: what phase one takes, and what it refuses."""

import ctypes
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from tests._aclnn import DType, Ints, phase_one

_NULL_POINTER, _INVALID = 161001, 161002
_F, _H, _B = torch.float32, torch.float16, torch.bfloat16
_I8, _U8, _I32, _I64, _BOOL = torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool
_ALL = 2147483647


class _T(NamedTuple):
    """A tensor to make on the device."""

    shape: tuple[int, ...]
    dtype: torch.dtype = _H

    def make(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device="npu")


def _t(*shape: int, dtype: torch.dtype = _H) -> _T:
    return _T(shape, dtype)


def _made(value: object) -> object:
    if isinstance(value, list):
        return [_made(each) for each in value]
    return value.make() if isinstance(value, _T) else value


@dataclass(frozen=True)
class _Function:
    name: str
    # A call that is taken.
    arguments: tuple[object, ...]
    # Another argument at a position, and what is said of it.
    refused: tuple[tuple[int, object, str], ...] = field(default=())


_FLOATS = "instead of float32, float16 or bfloat16"
_X, _ROW, _ROWS = _t(4, 8), _t(8), _t(4, 1, dtype=_F)
_ATTENTION = (_t(2, 4, 6, 16),) * 3
_STATISTICS = (_t(2, 4, 6, 8, dtype=_F),) * 2
_WINDOW = (0.25, 1.0, _ALL, _ALL, 4, "BNSD", 0, 0)
_STEP = [ctypes.c_float(value) for value in (1e-3, 0.9, 0.99, 0.01, 1e-8)]
_FUNCTIONS = [
    _Function(
        "aclnnSwiGlu",
        (_X, -1, _t(4, 4)),
        (
            (0, _t(4, 8, dtype=_I32), f"x has dtype int32 {_FLOATS}"),
            (2, _t(4, 4, dtype=_F), "out has dtype float32 instead of x's float16"),
            (0, _t(), "x has shape [] instead of [*, ...]"),
            (0, _t(4, 7), "dimension -1 has 7 elements, which cannot be halved"),
        ),
    ),
    _Function(
        "aclnnSwiGluGrad",
        (_t(4, 4), _X, -1, _X),
        (
            (0, _t(4, 4, dtype=_I64), f"yGrad has dtype int64 {_FLOATS}"),
            (3, _t(8, 4), "out has shape [8, 4] instead of [...x], where x is [4, 8]"),
        ),
    ),
    _Function(
        "aclnnGeluV2",
        (_X, 0, _X),
        (
            (2, _t(4, 8, dtype=_B), "y has dtype bfloat16 instead of x's float16"),
            (2, _t(8, 4), "y has shape [8, 4] instead of [...x], where x is [4, 8]"),
        ),
    ),
    _Function(
        "aclnnGeluBackwardV2",
        (_X, _X, "tanh", _X),
        ((1, _t(4, 8, dtype=_BOOL), f"self has dtype bool {_FLOATS}"), (0, _t(4, 7), "broadcast")),
    ),
    _Function(
        "aclnnFastGelu",
        (_X, _X),
        ((0, _t(4, 8, dtype=_I8), f"self has dtype int8 {_FLOATS}"), (1, _t(4, 7), "out has shape [4, 7]")),
    ),
    _Function(
        "aclnnGeGluV3",
        (_X, -1, 0, False, _t(4, 4), _t(4, 4)),
        (
            (4, _t(4, 4, dtype=_I32), f"out has dtype int32 {_FLOATS}"),
            (5, _t(4, 8), "outGelu has shape [4, 8] instead of [...y], where y is [4, 4]"),
        ),
    ),
    _Function(
        "aclnnRmsNorm",
        (_X, _ROW, 1e-6, _X, _ROWS),
        (
            (1, _t(8, dtype=_B), "gamma has dtype bfloat16 instead of x's float16 or float32"),
            (4, _t(4, 1), "rstdOut has dtype float16 instead of float32"),
            (1, _t(7), "gamma has shape [7], which is not the end of x's [4, 8]"),
        ),
    ),
    _Function(
        "aclnnRmsNormGrad",
        (_X, _X, _ROWS, _ROW, _X, _t(8, dtype=_F)),
        (
            (2, _t(4, 1), "rstd has dtype float16 instead of float32"),
            (1, _t(8, 8), "x has shape [8, 8] instead of [A, B, ...x], where A is 4 and B is 8"),
        ),
    ),
    _Function(
        "aclnnAddRmsNorm",
        (_X, _X, _ROW, 1e-6, _X, _ROWS, _X),
        (
            (2, _t(8, dtype=_F), "gamma has dtype float32 instead of x1's float16"),
            (1, _t(1, 8), "x2 has shape [1, 8] instead of [A, ...x], where A is 4 and x is [8]"),
        ),
    ),
    _Function(
        "aclnnAddLayerNorm",
        (_X, _X, _ROW, _ROW, None, 1e-5, True, _X, _ROWS, _ROWS, _X),
        (
            (1, _t(4, 8, dtype=_B), "the dtypes do not go together: x1 float16, x2 bfloat16, gamma float16"),
            (3, _t(8, dtype=_F), "beta has dtype float32 instead of gamma's float16"),
            (4, _t(3), "biasOptional has shape [3]"),
        ),
    ),
    _Function(
        "aclnnDeepNorm",
        (_X, _X, _ROW, _ROW, 0.3, 1e-6, _ROWS, _ROWS, _X),
        (
            (2, _t(8, dtype=_F), "beta has dtype float32 instead of x's float16"),
            (0, _t(8), "x has shape [8] instead of [A, B, ...x]"),
        ),
    ),
    _Function(
        "aclnnGroupNormSilu",
        (_t(2, 8, 3), _ROW, _ROW, 4, 1e-5, _t(2, 8, 3), _t(2, 4), _t(2, 4)),
        (
            (1, _t(8, dtype=_I32), f"gamma has dtype int32 {_FLOATS}"),
            (2, _t(3), "beta has shape [3] instead of [C], where C is 8"),
        ),
    ),
    _Function(
        "aclnnGroupNormSwish",
        (_t(2, 8, 3), _ROW, _ROW, 4, "NCHW", 1e-5, True, 1.0, _t(2, 8, 3), _t(2, 4), _t(2, 4)),
        (
            (0, _t(2, 8, 3, dtype=_I32), f"x has dtype int32 {_FLOATS}"),
            (1, _t(3), "gamma has shape [3] instead of [C], where C is 8"),
        ),
    ),
    _Function(
        "aclnnCrossEntropyLoss",
        (_X, _t(4, dtype=_I64), None, "mean", -100, 0.0, 0.0, False, _t(1), _X, None, None),
        (
            (1, _t(4, dtype=_H), "target has dtype float16 instead of int32 or int64"),
            (2, _t(8), "weightOptional has dtype float16 instead of float32"),
            (1, _t(3, dtype=_I64), "target has shape [3] instead of [N], where N is 4"),
        ),
    ),
    _Function(
        "aclnnCrossEntropyLossGrad",
        (_t(), _X, _t(4, dtype=_I64), None, None, None, "mean", -100, 0.0, 0.0, _X),
        (
            (1, _t(4, 8, dtype=_F), "logProb has dtype float32 instead of gradLoss's float16"),
            (2, _t(8, dtype=_I64), "target has shape [8] instead of [N], where N is 4"),
        ),
    ),
    _Function(
        "aclnnApplyAdamWV2",
        (_X, _X, _X, None, _X, _t(1, dtype=_F), *_STEP, False, False),
        (
            (5, _t(1, dtype=_I32), "step has dtype int32 instead of float32 or int64"),
            (4, _t(8, 4), "grad has shape [8, 4] instead of [...x], where x is [4, 8]"),
        ),
    ),
    _Function(
        "aclnnScaledMaskedSoftmax",
        (_t(1, 2, 32, 64), _t(1, 1, 32, 64, dtype=_BOOL), 1.0, False, _t(1, 2, 32, 64)),
        (
            (1, _t(1, 1, 32, 64, dtype=_U8), "mask has dtype uint8 instead of bool"),
            (0, _t(1, 2, 32, 33), "x has shape [1, 2, 32, 33] instead of [N, C, H%32<=4096, W%32<=4096]"),
        ),
    ),
    _Function(
        "aclnnDropoutGenMaskV2",
        (Ints([4, 8]), 0.5, 1, 0, DType(_F), _t(16, dtype=_U8)),
        (
            (5, _t(16, dtype=_BOOL), "out has dtype bool instead of uint8"),
            (5, _t(4, 4, dtype=_U8), "out has shape [4, 4] instead of [*]"),
        ),
    ),
    _Function(
        "aclnnDropoutDoMask",
        (_X, _t(16, dtype=_U8), 0.5, _X),
        (
            (1, _t(16, dtype=_I32), "mask has dtype int32 instead of uint8"),
            (3, _t(8, 4), "out has shape [8, 4] instead of [...x], where x is [4, 8]"),
        ),
    ),
    _Function(
        "aclnnRotaryPositionEmbedding",
        (_t(2, 3, 5, 16), _t(1, 1, 5, 16), _t(1, 1, 5, 16), 0, _t(2, 3, 5, 16)),
        (
            (1, _t(1, 1, 5, 16, dtype=_F), "cos has dtype float32 instead of x's float16"),
            (0, _t(2, 3, 5, 15), "x has shape [2, 3, 5, 15] instead of [A, B, C, D%2<=1024] or [T, N, D%2<=1024]"),
            (2, _t(5, 16), "sin has shape [5, 16] instead of"),
        ),
    ),
    _Function(
        "aclnnRotaryPositionEmbeddingGrad",
        (_t(2, 3, 5, 16), _t(1, 1, 5, 16), _t(1, 1, 5, 16), None, 0, _t(2, 3, 5, 16), _t(1, 1, 5, 16), _t(1, 1, 5, 16)),
        (
            (2, _t(1, 1, 5, 16, dtype=_B), "sin has dtype bfloat16 instead of dy's float16"),
            (1, _t(2, 1, 1, 8), "cos has shape [2, 1, 1, 8] instead of"),
        ),
    ),
    _Function(
        "aclnnApplyRotaryPosEmbV2",
        (_t(2, 5, 4, 128), _t(2, 5, 2, 128), _t(2, 5, 1, 128), _t(2, 5, 1, 128), 1, "half"),
        (
            (1, _t(2, 5, 2, 128, dtype=_F), "keyRef has dtype float32 instead of queryRef's float16"),
            (3, _t(2, 1, 1, 128), "sin has shape [2, 1, 1, 128] instead of [...c], where c is [2, 5, 1, 128]"),
        ),
    ),
    _Function(
        "aclnnInterleaveRope",
        (_t(2, 3, 5, 64), _t(2, 1, 5, 64), _t(2, 1, 5, 64), _t(2, 3, 5, 64)),
        (
            (0, _t(2, 3, 5, 64, dtype=_F), "x has dtype float32 instead of float16 or bfloat16"),
            (1, _t(2, 3, 5, 64), "cos has shape [2, 3, 5, 64] instead of [B, 1, S, 64] or [B, 1, 1, 64]"),
        ),
    ),
    _Function(
        "aclnnRopeWithSinCosCacheV2",
        (_t(3, dtype=_I64), _t(3, 128), _t(3, 64), _t(9, 64), None, 64, True, 0, _t(3, 128), _t(3, 64)),
        (
            (0, _t(3, dtype=_I32), "positions has dtype int32 instead of int64"),
            (3, _t(9, 64, dtype=_F), "cosSinCache has dtype float32 instead of queryIn's float16"),
            (2, _t(4, 64), "keyIn has shape [4, 64] instead of [T, K], where T is 3"),
            (5, 24, "head_size is 24"),
        ),
    ),
    _Function(
        "aclnnMoeGatingTopKSoftmax",
        (_X, None, 2, _t(4, 2), _t(4, 2, dtype=_I32), _t(4, 2, dtype=_I32)),
        (
            (3, _t(4, 2, dtype=_F), "yOut has dtype float32 instead of x's float16"),
            (4, _t(4, 2, dtype=_I64), "expertIdxOut has dtype int64 instead of int32"),
            (0, _t(8), "x has shape [8] instead of [N, E] or [M, N, E]"),
        ),
    ),
    _Function(
        "aclnnMoeInitRouting",
        (_X, _t(4, 2, dtype=_I32), _t(4, 2, dtype=_I32), 4, _t(8, 8), _t(8, dtype=_I32), _t(8, dtype=_I32)),
        (
            (1, _t(4, 2, dtype=_I64), "rowIdx has dtype int64 instead of int32"),
            (2, _t(3, 2, dtype=_I32), "expertIdx has shape [3, 2] instead of [N, K], where K is 2 and N is 4"),
        ),
    ),
    _Function(
        "aclnnMoeTokenPermute",
        (_X, _t(4, 2, dtype=_I64), 0, False, _t(8, 8), _t(8, dtype=_I32)),
        (
            (0, _t(4, 8, dtype=_I32), "tokens has dtype int32 instead of float32, float16, bfloat16 or int8"),
            (1, _t(3, 2, dtype=_I64), "indices has shape [3, 2] instead of [T, K<=512] or [T], where T is 4"),
            (5, _t(8, dtype=_I64), "sortedIndicesOut has dtype int64 instead of int32"),
        ),
    ),
    _Function(
        "aclnnMoeTokenPermuteGrad",
        (_t(8, 8), _t(8, dtype=_I32), 2, False, _X),
        (
            (1, _t(8, dtype=_I64), "sortedIndices has dtype int64 instead of int32"),
            (4, _t(4, 7), "out has shape [4, 7] instead of [*, H], where H is 8"),
        ),
    ),
    _Function(
        "aclnnMoeTokenUnpermute",
        (_t(8, 8), _t(8, dtype=_I32), _t(4, 2), False, None, _X),
        (
            (5, _t(4, 8, dtype=_F), "out has dtype float32 instead of permutedTokens's float16"),
            (2, _t(8), "probsOptional has shape [8] instead of [T, K<=512]"),
        ),
    ),
    _Function(
        "aclnnMoeTokenUnpermuteGrad",
        (_t(8, 8), _X, _t(8, dtype=_I32), _t(4, 2), False, None, _t(8, 8), _t(4, 2)),
        (
            (2, _t(8, dtype=_I64), "sortedIndices has dtype int64 instead of int32"),
            (7, _t(4, 3), "probsGradOut has shape [4, 3] instead of [T, K], where K is 2 and T is 4"),
        ),
    ),
    _Function(
        "aclnnMoeFinalizeRoutingV2",
        (_t(8, 8), _t(8, dtype=_I32), None, None, None, _t(4, 2), None, 0, _X),
        (
            (1, _t(8, dtype=_I64), "expandedRowIdx has dtype int64 instead of int32"),
            (8, _t(3, 8), "out has shape [3, 8] instead of [N, H], where H is 8 and N is 4"),
        ),
    ),
    _Function(
        "aclnnMoeReRouting",
        (_X, _t(2, 3, dtype=_I32), None, 1, 0, _X, None, _t(4, dtype=_I32), _t(3, dtype=_I32)),
        (
            (0, _t(4, 8, dtype=_F), "tokens has dtype float32 instead of float16, bfloat16 or int8"),
            (8, _t(3, dtype=_I64), "expertTokenNumOut has dtype int64 instead of expertTokenNumPerRank's int32"),
            (1, _t(6, dtype=_I32), "expertTokenNumPerRank has shape [6] instead of [N, E]"),
        ),
    ),
    _Function(
        "aclnnFlashAttentionScore",
        (*_ATTENTION, None, None, None, None, None, *_WINDOW, *_STATISTICS, None, _ATTENTION[0]),
        (
            (1, _t(2, 4, 6, 16, dtype=_B), "key has dtype bfloat16 instead of query's float16"),
            (6, _t(6, 6, dtype=_I32), "attenMaskOptional has dtype int32 instead of uint8 or bool"),
            (0, _t(6, 16), "query has shape [6, 16] instead of [*, *, *] or [*, *, *, *]"),
            (2, _t(2, 4, 6, 32), "the heads of queries, keys and values have 16, 16 and 32 elements"),
        ),
    ),
    _Function(
        "aclnnFlashAttentionScoreGrad",
        (*_ATTENTION, _ATTENTION[0], *(None,) * 4, *_STATISTICS, *(None,) * 3, *_WINDOW, *_ATTENTION, None),
        (
            (3, _t(2, 4, 6, 16, dtype=_F), "dy has dtype float32 instead of query's float16"),
            (8, _t(2, 4, 6, 8), "softmaxMaxOptional has dtype float16 instead of float32"),
            (3, _t(6, 16), "dy has shape [6, 16] instead of [*, *, *] or [*, *, *, *]"),
        ),
    ),
    _Function(
        "aclnnPromptFlashAttentionV3",
        (*_ATTENTION, *(None,) * 9, 4, 0.25, _ALL, _ALL, "BNSD", 0, 0, 0, _ATTENTION[0]),
        (
            (0, _t(2, 4, 6, 16, dtype=_F), "query has dtype float32 instead of float16 or bfloat16"),
            (1, _t(6, 16), "key has shape [6, 16] instead of [*, *, *] or [*, *, *, *]"),
        ),
    ),
    _Function(
        "aclnnIncreFlashAttentionV4",
        (_t(2, 4, 1, 16), [_ATTENTION[1]], [_ATTENTION[2]], *(None,) * 12, 4, 0.25, "BNSD", 0, 0, 0, _t(2, 4, 1, 16)),
        (
            (1, [_t(2, 4, 6, 16, dtype=_B)], "key[0] has dtype bfloat16 instead of query's float16"),
            (13, _t(2, dtype=_I32), "blockTableOptional has shape [2] instead of [*, *]"),
        ),
    ),
    _Function(
        "aclnnFusedInferAttentionScoreV3",
        (
            _ATTENTION[0],
            [_ATTENTION[1]],
            [_ATTENTION[2]],
            *(None,) * 24,
            *(4, 0.25, _ALL, _ALL, "BNSD", 0, 0, 0, 0, 0, False, 0, 0),
            _ATTENTION[0],
            None,
        ),
        (
            (0, _t(2, 4, 6, 16, dtype=_F), "query has dtype float32 instead of float16 or bfloat16"),
            (14, _t(2, 1, dtype=_I64), "blockTableOptional has dtype int64 instead of int32"),
            (0, _t(6, 16), "query has shape [6, 16] instead of [*, *, *] or [*, *, *, *]"),
        ),
    ),
    *[
        _Function(
            f"aclnnGroupedMatmulV{version}",
            (
                [_X],
                [_t(2, 8, 3)],
                *(None,) * 6,
                _t(2, dtype=_I64),
                *(None,) * 3,
                3,
                0,
                0,
                0,
                *more,
                [_t(4, 3)],
                None,
                None,
            ),
            (
                (8, _t(2, dtype=_I32), "groupListOptional has dtype int32 instead of int64"),
                (2, [_t(2, 3, dtype=_B)], "biasOptional has dtype bfloat16 instead of float32, float16 or int32"),
                (1, [_t(2, 7, 3)], "x of shape [4, 8] cannot be multiplied with matrices of shape [7, 3]"),
                (0, [_X] * 129, "x, weight and out are lists of 129, 1 and 1 tensors; CANN takes at most 128"),
            ),
        )
        for version, more in ((4, ()), (5, (None,)))
    ],
    _Function(
        "aclnnBatchNormElemt",
        (_t(2, 8, 3), _ROW, _ROW, _ROW, _ROW, 1e-5, _t(2, 8, 3)),
        (
            (3, _t(8, dtype=_F), "mean has dtype float32 instead of input's float16"),
            (4, _t(3), "invstd has shape [3] instead of [C], where C is 8"),
        ),
    ),
    _Function(
        "aclnnScatterNdUpdate",
        (_X, _t(2, 1, dtype=_I64), _t(2, 8)),
        (
            (2, _t(2, 8, dtype=_F), "updates has dtype float32 instead of varRef's float16"),
            (1, _t(2, dtype=_I64), "indices has shape [2] instead of [*, ..., *]"),
        ),
    ),
    _Function(
        "aclnnScatterPaKvCache",
        (
            *(_t(3, 2, 16), _t(4, 8, 2, 16), _t(3, dtype=_I32), _t(3, 2, 16), _t(4, 8, 2, 16)),
            *(None, None, None, "Norm", "None", None, None),
        ),
        (
            (0, _t(3, 2, 16, dtype=_F), "key has dtype float32 instead of float16, bfloat16 or int8"),
            (3, _t(3, 1, 16), "value has shape [3, 1, 16] instead of [T, N, V], where N is 2 and T is 3"),
        ),
    ),
    _Function(
        "aclnnDynamicQuantV2",
        (_X, None, None, 2, _t(4, 8, dtype=_I8), _t(4, dtype=_F), None),
        (
            (0, _t(4, 8, dtype=_F), "x has dtype float32 instead of float16 or bfloat16"),
            (0, _ROW, "x has shape [8] instead of [*, *, ...]"),
        ),
    ),
    _Function(
        "aclnnQuantMatmulV5",
        (
            *(_t(4, 8, dtype=_I8), _t(8, 3, dtype=_I8), None, _t(3, dtype=_B)),
            *(None, None, None, None, None, False, False, 0, _t(4, 3, dtype=_B)),
        ),
        (
            (3, _t(3), "x2Scale has dtype float16 instead of float32, bfloat16, int64 or uint64"),
            (12, _t(4, 3, dtype=_F), "out has dtype float32 instead of float16, bfloat16, int8 or int32"),
            (0, _t(8, dtype=_I8), "x1 has shape [8] instead of [*, *, ...]"),
        ),
    ),
]


@pytest.mark.parametrize("function", _FUNCTIONS, ids=lambda function: function.name)
def test_a_documented_call_is_taken(function):
    status, message, _ = phase_one(function.name, *map(_made, function.arguments))
    assert status == 0, message


@pytest.mark.parametrize(
    ("function", "position", "argument", "sentence"),
    [
        pytest.param(function, *refused, id=f"{function.name}-{refused[2]}")
        for function in _FUNCTIONS
        for refused in function.refused
    ],
)
def test_what_the_documents_do_not_take_is_refused(function, position, argument, sentence):
    arguments = [*function.arguments]
    arguments[position] = argument
    status, message, _ = phase_one(function.name, *map(_made, arguments))
    assert status == _INVALID
    assert sentence in message


@pytest.mark.parametrize(("position", "name"), [(0, "x"), (1, "gamma"), (3, "yOut"), (4, "rstdOut")])
def test_a_null_pointer_is_refused_by_the_name_of_the_argument(position, name):
    arguments = [_X.make(), _ROW.make(), 1e-6, _X.make(), _ROWS.make()]
    arguments[position] = None
    status, message, _ = phase_one("aclnnRmsNorm", *arguments)
    assert status == _NULL_POINTER
    assert f"{name} is a null pointer" in message
