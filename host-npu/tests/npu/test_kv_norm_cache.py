"""Norm, rotation and caches of latent attention on the host NPU, against plain indexing."""

import pytest
import torch
import torch_npu
from tests._values import assert_near, called

_BATCH, _VALUES, _KEYS, _EPSILON = 3, 32, 16, 1e-5


def _inputs(dtype, length=1):
    kv = torch.randn(_BATCH, 1, length, _VALUES + _KEYS).to(dtype)
    gamma = torch.randn(_VALUES).to(dtype)
    angles = torch.rand(_BATCH, 1, length, _KEYS)
    return kv, gamma, angles.cos().to(dtype), angles.sin().to(dtype)


def _rows(kv, gamma, cos, sin):
    """Return the rotated keys and the normalized values, [batch, 1, length, size]."""
    value, key = kv.double().split([_VALUES, _KEYS], -1)
    normal = value * (value.square().mean(-1, True) + _EPSILON).rsqrt() * gamma.double()
    first, second = key[..., ::2], key[..., 1::2]
    turned = torch.cat([-second, first], -1)
    return torch.cat([first, second], -1) * cos.double() + turned * sin.double(), normal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_go_to_their_slots_of_the_blocks(dtype):
    inputs = _inputs(dtype)
    keys, values = torch.zeros(4, 8, 1, _KEYS).to(dtype).npu(), torch.zeros(4, 8, 1, _VALUES).to(dtype).npu()
    slots = torch.tensor([9, -1, 30])
    torch_npu.npu_kv_rmsnorm_rope_cache(
        *[each.npu() for each in inputs], slots.npu(), keys, values, epsilon=_EPSILON, cache_mode="PA"
    )
    for cache, rows in zip((keys, values), _rows(*inputs), strict=True):
        expected = torch.zeros(32, rows.size(-1), dtype=torch.float64)
        expected[9], expected[30] = rows[0, 0, 0], rows[2, 0, 0]
        assert_near(cache.flatten(0, 2), expected, units=2)


def test_rows_go_to_their_places_of_the_sequences():
    inputs = _inputs(torch.float16, length=2)
    keys, values = torch.zeros(_BATCH, 1, 8, _KEYS).half().npu(), torch.zeros(_BATCH, 1, 8, _VALUES).half().npu()
    places = torch.tensor([[0, 1], [-1, 5], [7, 2]])
    options = {"epsilon": _EPSILON, "cache_mode": "Norm", "is_output_kv": True}
    *_, key_rows, value_rows = called(torch_npu.npu_kv_rmsnorm_rope_cache, *inputs, places, keys, values, **options)
    for cache, rows, given in zip((keys, values), _rows(*inputs), (key_rows, value_rows), strict=True):
        expected = torch.zeros(_BATCH, 1, 8, rows.size(-1), dtype=torch.float64)
        for batch, of_batch in enumerate(places.tolist()):
            for row, place in enumerate(of_batch):
                if place >= 0:
                    expected[batch, 0, place] = rows[batch, 0, row]
        assert_near(cache, expected, units=2)
        assert_near(given, rows, units=2)


def _in_tiles(cache):
    """Return a cache [blocks, positions, 1, size], whose blocks are in tiles of 16 columns, as [slots, size]."""
    tiles = cache.cpu().view(cache.size(0), -1, cache.size(1), 16)
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)


@pytest.mark.parametrize("mode", ["PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"])
def test_rows_go_to_blocks_and_tiles(mode):
    inputs = _inputs(torch.float16, length=10)
    keys, values = torch.zeros(8, 8, 1, _KEYS).half().npu(), torch.zeros(8, 8, 1, _VALUES).half().npu()
    slots = torch.randperm(64)[:30].view(_BATCH, 10)
    # The slots of the blocks of 8 and 2 rows of each sequence.
    blocks = torch.tensor([40, 0, 16, -1, 24, 56])
    if "BLK" in mode:
        first = blocks.view(_BATCH, 2, 1)
        slots = torch.where(first < 0, -1, first + torch.arange(8)).flatten(1)[:, :10]
    index = blocks if "BLK" in mode else slots.flatten()
    options = {"epsilon": _EPSILON, "cache_mode": mode}
    called(torch_npu.npu_kv_rmsnorm_rope_cache, *inputs, index, keys, values, **options)
    for cache, rows in zip((keys, values), _rows(*inputs), strict=True):
        expected = torch.zeros(64, rows.size(-1), dtype=torch.float64)
        expected[slots[slots >= 0]] = rows[:, 0][slots >= 0]
        assert_near(_in_tiles(cache) if mode.endswith("NZ") else cache.flatten(0, 2), expected, units=2)


@pytest.mark.parametrize("mode", ["PA", "PA_NZ"])
def test_caches_of_int8_have_scales(mode):
    inputs, slots, scale = _inputs(torch.float16), torch.tensor([9, -1, 30]), torch.rand(1, _VALUES) * 60
    # CANN supports int8 for either of the two caches.
    keys = torch.zeros(4, 8, 1, _KEYS).half().npu()
    values = torch.zeros(4, 8, 1, _VALUES, dtype=torch.int8).npu()
    torch_npu.npu_kv_rmsnorm_rope_cache(
        *(each.npu() for each in inputs), slots.npu(), keys, values, epsilon=_EPSILON, cache_mode=mode,
        c_kv_scale=scale.npu(),
    )  # fmt: skip
    key_rows, value_rows = (rows[:, 0, 0] for rows in _rows(*inputs))
    exact = torch.zeros(32, _VALUES, dtype=torch.float64)
    exact[[9, 30]] = (value_rows * scale)[[0, 2]].clamp(-128, 127)
    assert (values.cpu().view(32, _VALUES) - exact).abs().max() < 0.501
    assert_near(keys.view(32, _KEYS)[[9, 30]], key_rows[[0, 2]], units=2)


@pytest.mark.parametrize(
    ("dtype", "options", "sentence"),
    [
        (torch.int8, {}, "k_rope_scale is absent for a cache of dtype int8"),
        (torch.float16, {"k_rope_scale": torch.ones(_KEYS)}, "k_rope_scale is given for a cache of dtype float16"),
        (torch.int8, {"k_rope_scale": torch.ones(8)}, r"k_rope_scale has shape \[8\] instead of \[16\] or \[1, 16\]"),
        (torch.int8, {"k_rope_offset": torch.ones(_KEYS)}, "without k_rope_offset only"),
    ],
    ids=["absent", "float16", "shape", "offset"],
)
def test_scales_are_those_of_int8(dtype, options, sentence):
    keys, values = torch.zeros(4, 8, 1, _KEYS).to(dtype).npu(), torch.zeros(4, 8, 1, _VALUES).half().npu()
    on_npu = {name: each.npu() for name, each in options.items()}
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_kv_rmsnorm_rope_cache(
            *(each.npu() for each in _inputs(torch.float16)), torch.zeros(3).long().npu(), keys, values,
            cache_mode="PA", **on_npu,
        )  # fmt: skip


def test_other_cache_modes_are_refused_at_the_call():
    inputs = _inputs(torch.float16)
    caches = torch.zeros(4, 8, 1, _KEYS).half().npu(), torch.zeros(4, 8, 1, _VALUES).half().npu()
    with pytest.raises(RuntimeError, match="the cache modes Norm, PA, .* only, not PA_ND"):
        torch_npu.npu_kv_rmsnorm_rope_cache(
            *[each.npu() for each in inputs], torch.zeros(3).long().npu(), *caches, cache_mode="PA_ND"
        )


@pytest.mark.parametrize("shifted", [False, True], ids=["", "seq_offset"])
@pytest.mark.parametrize("cumulative", [False, True], ids=["lengths", "sums"])
def test_sequences_are_gathered_from_the_blocks_of_their_offsets(cumulative, shifted):
    keys, values = torch.randn(6, 4, 2, 8).half(), torch.randn(6, 4, 2, 16).half()
    tables, lengths = torch.tensor([[5, 1, 3], [2, 0, 4]], dtype=torch.int32), [6, 3]
    offsets = [7, 3] if shifted else [0, 0]
    of_rows = torch.tensor([0, 6, 9] if cumulative else lengths, dtype=torch.int32)
    results = torch.empty(9, 2, 8).half().npu(), torch.empty(9, 2, 16).half().npu()
    options = {"seq_offset": torch.tensor(offsets).int() if shifted else None, "is_seq_lens_cumsum": cumulative}
    called(torch_npu.npu_gather_pa_kv_cache, keys, values, tables, of_rows, *results, **options)
    places = [
        (tables[row, offset // 4 + token // 4], token % 4)
        for row, (length, offset) in enumerate(zip(lengths, offsets, strict=True))
        for token in range(length)
    ]
    for cache, result in zip((keys, values), results, strict=True):
        assert result.cpu().equal(torch.stack([cache[block, place] for block, place in places]))


def test_a_cache_has_places():
    inputs = _inputs(torch.float16)
    caches = torch.zeros(4, 0, 1, _KEYS).half().npu(), torch.zeros(4, 0, 1, _VALUES).half().npu()
    with pytest.raises(RuntimeError, match=r"a cache of shape \[4, 0, 1, 16\] does not take rows"):
        torch_npu.npu_kv_rmsnorm_rope_cache(
            *[each.npu() for each in inputs], torch.zeros(3).long().npu(), *caches, cache_mode="PA"
        )
