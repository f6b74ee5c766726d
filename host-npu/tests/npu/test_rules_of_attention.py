"""CANN's documented dtypes and shapes of attention, rotations, experts and caches."""

import torch
from tests._rules import Function, assert_refused, assert_sizes_fit, assert_taken, each, each_refusal, t

_F, _B = torch.float32, torch.bfloat16
_I32, _I64 = torch.int32, torch.int64
_ALL = 2147483647
_X = t(4, 8)
_ATTENTION = (t(2, 4, 6, 16),) * 3
_STATISTICS = (t(2, 4, 6, 8, dtype=_F),) * 2
_WINDOW = (0.25, 1.0, _ALL, _ALL, 4, "BNSD", 0, 0)
_FUNCTIONS = [
    Function(
        "aclnnRotaryPositionEmbedding",
        (t(2, 3, 5, 16), t(1, 1, 5, 16), t(1, 1, 5, 16), 0, t(2, 3, 5, 16)),
        (
            (1, t(1, 1, 5, 16, dtype=_F), "cos has dtype float32 instead of x's float16"),
            (0, t(2, 3, 5, 15), "x has shape [2, 3, 5, 15] instead of [A, B, C, D%2<=1024] or [T, N, D%2<=1024]"),
            (2, t(5, 16), "sin has shape [5, 16] instead of"),
        ),
    ),
    Function(
        "aclnnRotaryPositionEmbeddingGrad",
        (t(2, 3, 5, 16), t(1, 1, 5, 16), t(1, 1, 5, 16), None, 0, t(2, 3, 5, 16), t(1, 1, 5, 16), t(1, 1, 5, 16)),
        (
            (2, t(1, 1, 5, 16, dtype=_B), "sin has dtype bfloat16 instead of dy's float16"),
            (1, t(2, 1, 1, 8), "cos has shape [2, 1, 1, 8] instead of"),
        ),
        # Without x, the gradients of cos and sin are not written.
        free=((6, 0), (6, 2), (7, 0), (7, 2)),
    ),
    Function(
        "aclnnApplyRotaryPosEmbV2",
        (t(2, 5, 4, 128), t(2, 5, 2, 128), t(2, 5, 1, 128), t(2, 5, 1, 128), 1, "half"),
        (
            (1, t(2, 5, 2, 128, dtype=_F), "keyRef has dtype float32 instead of queryRef's float16"),
            (3, t(2, 1, 1, 128), "sin has shape [2, 1, 1, 128] instead of [2, 5, 1, 128]"),
            (0, t(2, 5, 4, 64), "keyRef has shape [2, 5, 2, 128] instead of [*, *, *, D] or [*, *, D], where D is 64"),
            (4, 2, "layout is SBND; CANN takes BSND and TND on this chip"),
            (5, "quarter", "rotaryMode is quarter; CANN takes half on this chip"),
        ),
        # The numbers of heads.
        free=((0, 2), (1, 2)),
    ),
    Function(
        "aclnnInterleaveRope",
        (t(2, 3, 5, 64), t(2, 1, 5, 64), t(2, 1, 5, 64), t(2, 3, 5, 64)),
        (
            (0, t(2, 3, 5, 64, dtype=_F), "x has dtype float32 instead of float16 or bfloat16"),
            (1, t(2, 3, 5, 64), "cos has shape [2, 3, 5, 64] instead of [B, 1, S, 64] or [B, 1, 1, 64]"),
        ),
    ),
    Function(
        "aclnnRopeWithSinCosCacheV2",
        (t(3, dtype=_I64), t(3, 128), t(3, 64), t(9, 64), None, 64, True, 0, t(3, 128), t(3, 64)),
        (
            (0, t(3, dtype=_I32), "positions has dtype int32 instead of int64"),
            (3, t(9, 64, dtype=_F), "cosSinCache has dtype float32 instead of queryIn's float16"),
            (2, t(4, 64), "keyIn has shape [4, 64] instead of [T, K], where T is 3"),
            (5, 24, "head_size is 24"),
        ),
        # The number of positions that the cache has.
        free=((3, 0),),
    ),
    Function(
        "aclnnMoeGatingTopKSoftmax",
        (_X, None, 2, t(4, 2), t(4, 2, dtype=_I32), t(4, 2, dtype=_I32)),
        (
            (3, t(4, 2, dtype=_F), "yOut has dtype float32 instead of x's float16"),
            (4, t(4, 2, dtype=_I64), "expertIdxOut has dtype int64 instead of int32"),
            (0, t(8), "x has shape [8] instead of [N, E] or [M, N, E]"),
        ),
        # The number of experts.
        free=((0, 1),),
    ),
    Function(
        "aclnnMoeInitRouting",
        (_X, t(4, 2, dtype=_I32), t(4, 2, dtype=_I32), 4, t(8, 8), t(8, dtype=_I32), t(8, dtype=_I32)),
        (
            (1, t(4, 2, dtype=_I64), "rowIdx has dtype int64 instead of int32"),
            (2, t(3, 2, dtype=_I32), "expertIdx has shape [3, 2] instead of [N, K], where K is 2 and N is 4"),
        ),
    ),
    Function(
        "aclnnMoeTokenPermute",
        (_X, t(4, 2, dtype=_I64), 0, False, t(8, 8), t(8, dtype=_I32)),
        (
            (0, t(4, 8, dtype=_I32), "tokens has dtype int32 instead of float32, float16, bfloat16 or int8"),
            (1, t(3, 2, dtype=_I64), "indices has shape [3, 2] instead of [T, K<=512] or [T], where T is 4"),
            (5, t(8, dtype=_I64), "sortedIndicesOut has dtype int64 instead of int32"),
        ),
    ),
    Function(
        "aclnnMoeTokenPermuteGrad",
        (t(8, 8), t(8, dtype=_I32), 2, False, _X),
        (
            (1, t(8, dtype=_I64), "sortedIndices has dtype int64 instead of int32"),
            (4, t(4, 7), "out has shape [4, 7] instead of [*, H], where H is 8"),
        ),
        # Copies of tokens may have been left out.
        free=((0, 0),),
    ),
    Function(
        "aclnnMoeTokenUnpermute",
        (t(8, 8), t(8, dtype=_I32), t(4, 2), False, None, _X),
        (
            (5, t(4, 8, dtype=_F), "out has dtype float32 instead of permutedTokens's float16"),
            (2, t(8), "probsOptional has shape [8] instead of [T, K<=512]"),
        ),
        # Copies of tokens may have been left out.
        free=((0, 0),),
    ),
    Function(
        "aclnnMoeTokenUnpermuteGrad",
        (t(8, 8), _X, t(8, dtype=_I32), t(4, 2), False, None, t(8, 8), t(4, 2)),
        (
            (2, t(8, dtype=_I64), "sortedIndices has dtype int64 instead of int32"),
            (7, t(4, 3), "probsGradOut has shape [4, 3] instead of [T, K] or [], where K is 2 and T is 4"),
        ),
    ),
    Function(
        "aclnnMoeFinalizeRouting",
        (t(8, 8), _X, _X, t(3, 8), t(4, 2), t(8, dtype=_I32), t(4, 2, dtype=_I32), _X),
        (
            (3, t(3, 8, dtype=_F), "bias has dtype float32 instead of expandedX's float16"),
            (4, t(4, 2, dtype=_F), "scales has dtype float32 instead of expandedX's float16"),
            (7, t(3, 8), "out has shape [3, 8] instead of [N, H], where H is 8 and N is 4"),
        ),
        # The number of rows of experts, and of experts.
        free=((0, 0), (3, 0)),
    ),
    Function(
        "aclnnMoeFinalizeRoutingV2",
        (t(8, 8), t(8, dtype=_I32), None, None, None, t(4, 2), None, 0, _X),
        (
            (1, t(8, dtype=_I64), "expandedRowIdx has dtype int64 instead of int32"),
            (2, t(4, 8, dtype=_F), "x1Optional has dtype float32 instead of expandedX's float16"),
            (4, t(3, 8, dtype=_B), "biasOptional has dtype bfloat16 instead of expandedX's float16"),
            (8, t(3, 8), "out has shape [3, 8] instead of [N, H], where H is 8 and N is 4"),
        ),
        # The number of rows of experts.
        free=((0, 0),),
    ),
    Function(
        "aclnnMoeReRouting",
        (_X, t(2, 3, dtype=_I32), None, 1, 0, _X, None, t(4, dtype=_I32), t(3, dtype=_I32)),
        (
            (0, t(4, 8, dtype=_F), "tokens has dtype float32 instead of float16, bfloat16 or int8"),
            (8, t(3, dtype=_I64), "expertTokenNumOut has dtype int64 instead of expertTokenNumPerRank's int32"),
            (1, t(6, dtype=_I32), "expertTokenNumPerRank has shape [6] instead of [N, E]"),
        ),
        # The number of ranks.
        free=((1, 0),),
    ),
    Function(
        "aclnnFlashAttentionScore",
        (*_ATTENTION, None, None, None, None, None, *_WINDOW, *_STATISTICS, None, _ATTENTION[0]),
        (
            (1, t(2, 4, 6, 16, dtype=_B), "key has dtype bfloat16 instead of query's float16"),
            (6, t(6, 6, dtype=_I32), "attenMaskOptional has dtype int32 instead of uint8 or bool"),
            (0, t(6, 16), "query has shape [6, 16] instead of [*, *, *] or [*, *, *, *]"),
            (2, t(2, 4, 6, 32), "the heads of queries, keys and values have 16, 16 and 32 elements"),
        ),
    ),
    Function(
        "aclnnFlashAttentionScoreGrad",
        (*_ATTENTION, _ATTENTION[0], *(None,) * 4, *_STATISTICS, *(None,) * 3, *_WINDOW, *_ATTENTION, None),
        (
            (3, t(2, 4, 6, 16, dtype=_F), "dy has dtype float32 instead of query's float16"),
            (8, t(2, 4, 6, 8), "softmaxMaxOptional has dtype float16 instead of float32"),
            (3, t(6, 16), "dy has shape [6, 16] instead of [*, *, *] or [*, *, *, *]"),
        ),
    ),
    Function(
        "aclnnPromptFlashAttentionV3",
        (*_ATTENTION, *(None,) * 9, 4, 0.25, _ALL, _ALL, "BNSD", 0, 0, 0, _ATTENTION[0]),
        (
            (0, t(2, 4, 6, 16, dtype=_F), "query has dtype float32 instead of float16 or bfloat16"),
            (1, t(6, 16), "key has shape [6, 16] instead of [*, *, *] or [*, *, *, *]"),
        ),
    ),
    Function(
        "aclnnIncreFlashAttentionV4",
        (t(2, 4, 1, 16), [_ATTENTION[1]], [_ATTENTION[2]], *(None,) * 12, 4, 0.25, "BNSD", 0, 0, 0, t(2, 4, 1, 16)),
        (
            (1, [t(2, 4, 6, 16, dtype=_B)], "key[0] has dtype bfloat16 instead of query's float16"),
            (13, t(2, dtype=_I32), "blockTableOptional has shape [2] instead of [*, *]"),
        ),
    ),
    Function(
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
            (0, t(2, 4, 6, 16, dtype=_F), "query has dtype float32 instead of float16 or bfloat16"),
            (14, t(2, 1, dtype=_I64), "blockTableOptional has dtype int64 instead of int32"),
            (0, t(6, 16), "query has shape [6, 16] instead of [*, *, *] or [*, *, *, *]"),
        ),
    ),
    *[
        Function(
            f"aclnnGroupedMatmul{version}",
            (
                [_X],
                [t(2, 8, 3)],
                *(None,) * 6,
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
                (8, t(2, dtype=_I32), "groupListOptional has dtype int32 instead of int64"),
                (2, [t(2, 3, dtype=_B)], "biasOptional has dtype bfloat16 instead of float32, float16 or int32"),
                (1, [t(2, 7, 3)], "x of shape [4, 8] cannot be multiplied with matrices of shape [7, 3]"),
                (0, [_X] * 129, "x, weight and out are lists of 129, 1 and 1 tensors; CANN takes at most 128"),
            ),
        )
        for version, more in (("V4", ()), ("V5", (None,)), ("WeightNz", (None, 0)))
    ],
    Function(
        "aclnnScatterPaKvCache",
        (
            *(t(3, 2, 16), t(4, 8, 2, 16), t(3, dtype=_I32), t(3, 2, 16), t(4, 8, 2, 16)),
            *(None, None, None, "Norm", "None", None, None),
        ),
        (
            (0, t(3, 2, 16, dtype=_F), "key has dtype float32 instead of float16, bfloat16 or int8"),
            (3, t(3, 1, 16), "value has shape [3, 1, 16] instead of [T, N, V], where N is 2 and T is 3"),
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
