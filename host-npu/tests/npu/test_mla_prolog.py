"""MlaProlog on the host NPU, against float64 with roundings to bfloat16 between the products."""

from dataclasses import dataclass

import pytest
import torch
import torch_npu
from tests._values import moved
from torch import Tensor

_HIDDEN, _QUERY_RANK, _KEY_RANK, _HEADS, _SIZE, _ROPE = 1024, 1536, 512, 2, 128, 64
_BLOCKS, _PLACES, _EPSILON, _NZ = 3, 16, 1e-5, 29

pytestmark = pytest.mark.usefixtures("private_formats")


def _brain(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _norm(x: Tensor, gamma: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, gamma.shape, gamma.double(), _EPSILON)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the neighbors of x as halves, rotated."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat([first, second], -1) * cos.double() + torch.cat([-second, first], -1) * sin.double()


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, True) / 127
    return (x / scale).round(), scale


@dataclass
class _Layer:
    """The weights and the tokens of a batch."""

    tokens: Tensor
    weights: list[Tensor]
    gammas: list[Tensor]
    angles: list[Tensor]
    scales: dict[str, Tensor]
    cache_scale: float = 1.0

    @property
    def arguments(self) -> list[Tensor]:
        down_query, up_query, up_key, down_key = self.weights
        tiled = [torch_npu.npu_format_cast(each.npu(), _NZ) for each in (down_query, up_query, down_key)]
        tiled.insert(2, up_key.npu())
        return [self.tokens.npu(), *tiled, *[each.npu() for each in (*self.gammas, *self.angles)]]

    def product(self, x: Tensor, weight: int, name: str, row_scale: Tensor | None = None) -> Tensor:
        y = x.double() @ self.weights[weight].double()
        if row_scale is None:
            return y
        return y * row_scale.double() * self.scales[name].double()

    def latent(self, query_factor: float = 1) -> Tensor:
        """Return the latent from which the queries are computed."""
        row_scale = self.scales.get("dequant_scale_x")
        latent = self.product(self.tokens.flatten(0, -2), 0, "dequant_scale_w_dq", row_scale)
        return _norm(_brain(latent) if row_scale is None else latent, self.gammas[0]) * query_factor

    def expected(self, query_factor: float = 1, key_factor: float = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the queries and keys, each as the parts without and with rotation."""
        x, sin, cos = (each.flatten(0, -2) for each in (self.tokens, *self.angles))
        row_scale = self.scales.get("dequant_scale_x")
        latent = self.latent(query_factor)
        if "smooth_scales_cq" in self.scales:
            whole, scale = _quantized(latent * self.scales["smooth_scales_cq"].double())
            heads = self.product(whole, 1, "dequant_scale_w_uq_qr", scale)
        else:
            heads = _brain(self.product(_brain(latent), 1, ""))
        nope, rope = heads.view(len(x), _HEADS, -1).split([_SIZE, _ROPE], -1)
        query = torch.einsum("tnd,ndh->tnh", _brain(nope), self.weights[2].double())
        keys = self.product(x, 3, "dequant_scale_w_dkv_kr", row_scale)
        key, key_rope = keys.split([_KEY_RANK, _ROPE], -1)
        key = _norm(key, self.gammas[1]) * key_factor
        return query, _turned(rope, cos[:, None], sin[:, None]), key, _turned(key_rope, cos, sin)


_SHAPES = (
    (_HIDDEN, _QUERY_RANK),
    (_QUERY_RANK, _HEADS * (_SIZE + _ROPE)),
    (_HEADS, _SIZE, _KEY_RANK),
    (_HIDDEN, _KEY_RANK + _ROPE),
)


def _layer(*shape: int, int8: bool = False, int8_latent: bool = False) -> _Layer:
    """Return a layer in bfloat16, in int8, or with only the second product of the queries in int8."""
    brain = {"dtype": torch.bfloat16}
    tokens = torch.randn(*shape, _HIDDEN, **brain)
    weights = [torch.randn(each, **brain) / each[-2] ** 0.5 for each in _SHAPES]
    gammas = [torch.rand(size, **brain) + 0.5 for size in (_QUERY_RANK, _KEY_RANK)]
    angles = torch.rand(*shape, _ROPE) * 6
    layer = _Layer(tokens, weights, gammas, [angles.sin().to(**brain), angles.cos().to(**brain)], {})
    names = {1: "dequant_scale_w_uq_qr"} if int8 or int8_latent else {}
    if int8:
        rows = tokens.flatten(0, -2).size(0)
        layer.tokens = torch.randint(-100, 100, tokens.shape, dtype=torch.int8)
        layer.scales["dequant_scale_x"] = torch.rand(rows, 1) + 0.5
        names |= {0: "dequant_scale_w_dq", 3: "dequant_scale_w_dkv_kr"}
    for index, name in names.items():
        weights[index] = torch.randint(-100, 100, _SHAPES[index], dtype=torch.int8)
        layer.scales[name] = torch.rand(1, _SHAPES[index][1]) / 1000 + 1e-4
    if names:
        layer.scales["smooth_scales_cq"] = torch.rand(1, _QUERY_RANK) + 0.5
    return layer


def _caches(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    keys = torch.zeros(_BLOCKS, _PLACES, 1, _KEY_RANK).to(dtype).npu()
    return keys, torch.zeros(_BLOCKS, _PLACES, 1, _ROPE, dtype=torch.bfloat16).npu()


def _slots(cache: Tensor, mode: str) -> Tensor:
    """Return the rows of a cache, [slots, size]; PA_NZ stores the columns of a block in parts of 32 bytes."""
    if mode == "PA_NZ":
        width = 32 // cache.element_size()
        cache = cache.reshape(_BLOCKS, -1, _PLACES, width).transpose(1, 2)
    return cache.cpu().reshape(_BLOCKS * _PLACES, -1).double()


def _close(actual: Tensor, expected: Tensor) -> None:
    limit = 2**-7 * expected.abs().max().item()
    torch.testing.assert_close(actual.cpu().double().view(expected.shape), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("int8_latent", [False, True])
@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_tokens_become_queries_and_go_to_the_caches(shape, mode, int8_latent):
    layer, caches = _layer(*shape, int8_latent=int8_latent), _caches()
    index = torch.randperm(_BLOCKS * _PLACES)[: layer.tokens[..., 0].numel()].view(shape)
    options = {"cache_mode": mode, "rmsnorm_epsilon_cq": _EPSILON, **moved(layer.scales)}
    query, query_rope, *given, _ = torch_npu.npu_mla_prolog_v2(*layer.arguments, index.npu(), *caches, **options)
    assert query.shape == (*shape, _HEADS, _KEY_RANK) and query_rope.shape == (*shape, _HEADS, _ROPE)
    *queries, key, key_rope = layer.expected()
    _close(query, queries[0])
    _close(query_rope, queries[1])
    for cache, rows in zip(given, (key, key_rope), strict=True):
        expected = torch.zeros(_BLOCKS * _PLACES, rows.size(1), dtype=torch.float64)
        expected[index.flatten()] = rows
        _close(_slots(cache, mode), expected)


def test_the_third_version_has_factors_and_writes_in_place():
    layer, caches = _layer(3), _caches()
    index = torch.tensor([40, -1, 7])
    query, query_rope, *_ = torch_npu.npu_mla_prolog_v3(
        *layer.arguments, *caches, cache_index=index.npu(), qc_qr_scale=2.0, kc_scale=3.0
    )
    *queries, key, key_rope = layer.expected(2.0, 3.0)
    _close(query, queries[0])
    _close(query_rope, queries[1])
    for cache, rows in zip(caches, (key, key_rope), strict=True):
        expected = torch.zeros(_BLOCKS * _PLACES, rows.size(1), dtype=torch.float64)
        expected[[40, 7]] = rows[[0, 2]]
        _close(_slots(cache, "PA_BSND"), expected)


@pytest.mark.parametrize("int8_cache", [False, True])
def test_tokens_and_weights_in_int8(int8_cache):
    layer, caches = _layer(2, 2, int8=True), _caches(torch.int8 if int8_cache else torch.bfloat16)
    index = torch.tensor([[40, 3], [7, 0]])
    scales = {name: scale.npu() for name, scale in layer.scales.items()}
    cache_scale = 9.0
    if int8_cache:
        # CANN reads only the first number.
        scales["quant_scale_ckv"] = torch.tensor([[cache_scale] + [1.0] * (_KEY_RANK - 1)]).npu()
    query, query_rope, keys, key_ropes, query_scale = torch_npu.npu_mla_prolog_v2(
        *layer.arguments, index.npu(), *caches, **scales
    )
    queries, ropes, key, key_rope = layer.expected()
    rows = _slots(keys, "PA_BSND")[index.flatten()]
    if int8_cache:
        assert query.dtype == torch.int8
        whole, scale = _quantized(_brain(queries))
        torch.testing.assert_close(query_scale.cpu().double().view(scale.shape), scale, rtol=2**-7, atol=0)
        # A number that is rounded to bfloat16 in the other direction may be quantized to a neighbor.
        steps = (query.cpu().double().view(whole.shape) - whole).abs()
        assert steps.max() <= 1 and steps.mean() < 0.02
        _close(query_rope, _brain(ropes) * cache_scale / scale)
        assert ((key * cache_scale).clamp(-128, 127) - rows).abs().max() < 0.51
    else:
        _close(query, queries)
        _close(query_rope, ropes)
        _close(rows, key)
    _close(_slots(key_ropes, "PA_BSND")[index.flatten()], key_rope)


def test_the_normalized_rows_of_the_queries_are_returned_if_that_is_asked_for():
    layer = _layer(2, 2)
    *_, latent, _ = torch_npu.npu_mla_prolog_v3(
        *layer.arguments, *_caches(), cache_index=torch.tensor([[40, 3], [7, 0]]).npu(), query_norm_flag=True
    )
    assert latent.shape == (2, 2, _QUERY_RANK)
    _close(latent.flatten(0, 1), layer.latent())


@pytest.mark.parametrize("mode", [1, 2])
def test_the_normalized_rows_of_the_queries_in_int8(mode):
    layer = _layer(2, 2, int8=mode == 2, int8_latent=True)
    scales = {name: scale.npu() for name, scale in layer.scales.items()}
    *_, latent, scale = torch_npu.npu_mla_prolog_v3(
        *(*layer.arguments, *_caches()), cache_index=torch.tensor([[40, 3], [7, 0]]).npu(),
        weight_quant_mode=mode, query_norm_flag=True, **scales,
    )  # fmt: skip
    assert latent.dtype == torch.int8 and latent.shape == (2, 2, _QUERY_RANK) and scale.shape == (4, 1)
    whole, expected_scale = _quantized(layer.latent() * layer.scales["smooth_scales_cq"].double())
    torch.testing.assert_close(scale.cpu().double(), expected_scale, rtol=2**-7, atol=0)
    assert (latent.cpu().flatten(0, 1) - whole).abs().max() <= 1


def _with(change, **options):
    layer = _layer(2)
    arguments = [*layer.arguments, torch.tensor([1, 2]).npu(), *_caches()]
    change(arguments)
    torch_npu.npu_mla_prolog_v2(*arguments, **options)


def _replace(index: int, *shape: int, dtype: torch.dtype = torch.bfloat16):
    return lambda arguments: arguments.__setitem__(index, torch.ones(shape, dtype=dtype, device="npu"))


_REFUSED = {
    "another cache mode": (lambda arguments: None, {"cache_mode": "PA_BLK_BSND"}, "cache modes PA_BSND and PA_NZ only"),
    "float16": (
        _replace(0, 2, _HIDDEN, dtype=torch.float16),
        {},
        "tokenX has dtype float16 instead of bfloat16 or int8",
    ),
    "a hidden size": (_replace(0, 2, 1000), {}, "weightDq has shape"),
    "a rank of keys": (_replace(3, _HEADS, _SIZE, 256), {}, "weightUk has shape"),
    "int8 alone": (_replace(1, *_SHAPES[0], dtype=torch.int8), {}, "tokenX and all its weights in int8, weightUqQr al"),
    "no scale": (_replace(2, *_SHAPES[1], dtype=torch.int8), {}, "must be given where they have dtype int8"),
    "one scale": (lambda arguments: None, {"dequant_scale_w_dq": torch.ones(1, _QUERY_RANK)}, "dtype int8, and only"),
    "a smooth scale": (lambda arguments: None, {"smooth_scales_cq": torch.ones(1, _QUERY_RANK)}, "for weightUqQr of"),
    "a scale": (lambda arguments: None, {"quant_scale_ckv": torch.ones(1, _KEY_RANK)}, "quantScaleCkv must be given"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_other_arguments_are_refused(case):
    change, options, sentence = _REFUSED[case]
    with pytest.raises(RuntimeError, match=sentence):
        _with(change, **moved(options))
