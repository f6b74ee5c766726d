"""Rotary embeddings of query and key on the host NPU, against their formula in float64."""

import pytest
import torch
import torch_npu
from tests._process import on_npu
from tests._values import DTYPES, assert_near


def _turned(x, mode):
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


@DTYPES
@pytest.mark.parametrize(
    ("layout", "shapes"), [("BSND", ((2, 3, 4, 128), (2, 3, 1, 128))), ("TND", ((5, 4, 64), (5, 1, 64)))]
)
def test_query_and_key_are_rotated_in_place(dtype, layout, shapes):
    query, key, cos, sin = [torch.randn(shape).to(dtype) for shape in (shapes[0], *[shapes[1]] * 3)]
    on_npu = [each.npu() for each in (query, key, cos, sin)]
    results = torch_npu.npu_apply_rotary_pos_emb(*on_npu, layout, "half")
    for x, memory, result in zip((query, key), on_npu, results, strict=False):
        expected = x.double() * cos.double() + _turned(x.double(), "half") * sin.double()
        assert_near(result, expected)
        assert torch.equal(result.cpu(), memory.cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_interleave_rope_sorts_the_pairs_before_it_rotates_halves(dtype):
    x = torch.randn(2, 3, 5, 64).to(dtype)
    cos, sin = torch.randn(2, 2, 1, 5, 64).to(dtype)
    result = torch_npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu())
    ordered = torch.cat([x[..., ::2], x[..., 1::2]], -1).double()
    assert_near(result, ordered * cos.double() + _turned(ordered, "half") * sin.double())


# Shapes of x and cos, the mode, and the Ascend910B's message, or None for valid calls.
_OF_THE_CHIP = {
    "large heads": ((1, 2, 3, 896), (1, 1, 3, 896), "half", "fewer than 896"),
    "the largest heads": ((1, 2, 3, 894), (1, 1, 3, 894), "half", None),
    "interleave by heads": ((2, 2, 3, 64), (2, 2, 3, 64), "interleave", "11SD, 1S1D or S11D"),
    "interleave by positions": ((2, 2, 3, 64), (1, 1, 3, 64), "interleave", None),
    "the same angles": ((2, 2, 3, 64), (1, 1, 1, 64), "half", "same angles"),
    "angles of heads": ((2, 2, 3, 64), (1, 2, 3, 64), "half", "for all heads"),
    "one position": ((2, 2, 1, 64), (1, 1, 1, 64), "half", None),
}


@pytest.mark.parametrize(("shape", "angles", "mode", "refused"), _OF_THE_CHIP.values(), ids=_OF_THE_CHIP)
def test_rotary_mul_takes_what_cann_documents_for_the_chip(shape, angles, mode, refused):
    x, cos, sin = torch.randn(shape), torch.randn(angles), torch.randn(angles)
    on_npu = x.npu(), cos.npu(), sin.npu()
    if refused:
        with pytest.raises(RuntimeError, match=refused):
            torch_npu.npu_rotary_mul(*on_npu, mode)
    else:
        expected = x.double() * cos.double() + _turned(x.double(), mode) * sin.double()
        assert_near(torch_npu.npu_rotary_mul(*on_npu, mode), expected)


@pytest.mark.parametrize(
    ("shape", "angles", "layout", "mode", "refused"),
    [
        ((2, 3, 4, 32), (2, 3, 1, 32), "BSND", "half", "heads have 32 elements; CANN rotates 64 or 128 on this chip"),
        ((2, 3, 4, 64), (2, 3, 1, 64), "BSND", "interleave", "rotaryMode is interleave; CANN takes half on this chip"),
        ((3, 2, 4, 64), (3, 2, 1, 64), "SBND", "half", "layout is SBND; CANN takes BSND and TND on this chip"),
        ((2, 3, 4, 64), (1, 3, 1, 64), "BSND", "half", r"cos has shape \[1, 3, 1, 64\] instead of \[B, S, 1, E\]"),
        ((5, 4, 64), (1, 1, 64), "TND", "half", r"cos has shape \[1, 1, 64\] instead of \[T, 1, E\], where T is 5"),
    ],
    ids=["small heads", "interleave", "a layout", "one batch of angles", "one token of angles"],
)
def test_rotations_in_place_are_those_that_cann_documents_for_the_chip(shape, angles, layout, mode, refused):
    query, angles = torch.ones(shape).npu(), torch.ones(angles).npu()
    with pytest.raises(RuntimeError, match=refused):
        torch_npu.npu_apply_rotary_pos_emb(query, query.clone(), angles, angles, layout, mode)


def _rotate_what_a2_refuses() -> None:
    for x, angles, mode in ((2, 3, 4, 1024), (2, 3, 4, 1024), "half"), ((2, 3, 4, 64), (1, 1, 1, 64), "interleave"):
        x, cos, sin = torch.ones(x).npu(), torch.full(angles, 3.0).npu(), torch.ones(angles).npu()
        assert set(torch_npu.npu_rotary_mul(x, cos, sin, mode).flatten().tolist()) == {2, 4}
    query, angles = torch.ones(2, 4, 3, 32).npu(), torch.ones(1, 1, 3, 32).npu()
    for each in torch_npu.npu_apply_rotary_pos_emb(query, query.clone(), angles * 3, angles, "BNSD", "interleave"):
        assert set(each.flatten().tolist()) == {2, 4}


def test_an_ascend950_rotates_larger_heads_by_any_angles():
    on_npu(_rotate_what_a2_refuses, HOST_NPU_SOC="Ascend950")


def test_a_part_of_a_head_is_refused():
    query, part = torch.ones(1, 2, 1, 128).npu(), torch.ones(1, 2, 1, 64).npu()
    with pytest.raises(RuntimeError, match="rotates whole heads only"):
        torch_npu.npu_apply_rotary_pos_emb(query, query.clone(), part, part)


@DTYPES
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("size", [64, 32], ids=["whole heads", "half of each head"])
def test_mrope_rotates_by_the_row_of_a_position(dtype, mode, size):
    positions, cache = torch.tensor([3, 0, 7]), torch.randn(9, size).to(dtype)
    query, key = torch.randn(3, 4 * 64).to(dtype), torch.randn(3, 2 * 64).to(dtype)
    on_npu = [each.npu() for each in (positions, query, key, cache)]
    results = torch_npu.npu_mrope(*on_npu, 64, mrope_section=[0, 0, 0], rotary_mode=mode)
    for x, result in zip((query, key), results, strict=True):
        heads = x.double().view(3, -1, 64)
        first, rest = heads.split([size, 64 - size], -1)
        cos, sin = [
            torch.cat([each, each], -1) if mode == "half" else each.repeat_interleave(2, -1)
            for each in cache.double()[positions][:, None].chunk(2, -1)
        ]
        expected = torch.cat([first * cos + _turned(first, mode) * sin, rest], -1).flatten(1)
        assert_near(result, expected)


@DTYPES
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("sections", [[16, 24, 24], [24, 20, 20], [8, 12, 12], [16, 16, 16, 16]], ids=str)
def test_mrope_takes_each_section_at_positions_of_its_own(dtype, mode, sections):
    size = 2 * sum(sections)
    positions, cache = torch.randint(0, 9, (len(sections), 3)), torch.randn(9, size).to(dtype)
    query, key = torch.randn(3, 4 * 128).to(dtype), torch.randn(3, 2 * 128).to(dtype)
    on_npu = [each.npu() for each in (positions, query, key, cache)]
    results = torch_npu.npu_mrope(*on_npu, 128, mrope_section=sections, rotary_mode=mode)
    parts = [
        torch.cat([part[index] for index, part in enumerate(half.split(sections, -1))], -1)[:, None]
        for half in cache.double()[positions].chunk(2, -1)
    ]
    cos, sin = [torch.cat([x, x], -1) if mode == "half" else x.repeat_interleave(2, -1) for x in parts]
    for x, result in zip((query, key), results, strict=True):
        first, rest = x.double().view(3, -1, 128).split([size, 128 - size], -1)
        assert_near(result, torch.cat([first * cos + _turned(first, mode) * sin, rest], -1).flatten(1))


@pytest.mark.parametrize("sections", [[16, 24, 24], [24, 20, 20]], ids=str)
def test_mrope_takes_the_sections_by_turns(sections):
    positions, cache, x = torch.randint(0, 9, (3, 3)), torch.randn(9, 128), torch.randn(3, 128)
    on_npu = [each.npu() for each in (positions, x, x, cache)]
    results = torch_npu.npu_mrope(*on_npu, 128, mrope_section=sections, cache_mode="interleave")
    # Dimensions 1, 4, 7, ... belong to the second section and 2, 5, 8, ... to the third, up to their lengths.
    taken = torch.tensor([turn % 3 if turn < 3 * sections[1] else 0 for turn in range(64)])
    halves = [half.gather(0, taken.expand(1, 3, -1))[0] for half in cache.double()[positions].chunk(2, -1)]
    cos, sin = [torch.cat([half, half], -1) for half in halves]
    for result in results:
        assert_near(result, x.double() * cos + _turned(x.double(), "half") * sin)


@pytest.mark.parametrize(
    ("sections", "size", "sentence"),
    [
        ([8, 4, 4], 32, r"mropeSection is \[8, 4, 4\]; CANN takes \[16, 24, 24\] and"),
        ([16, 16, 16, 16], 128, r"positions has shape \[3, 3\] for 4 sections"),
        ([16, 24, 24], 64, "rows of 64 elements instead of twice the sum"),
    ],
    ids=["sections", "positions", "cache"],
)
def test_other_mrope_sections_are_refused(sections, size, sentence):
    x, positions = torch.ones(3, 128).npu(), torch.zeros(3, 3, dtype=torch.int64).npu()
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_mrope(positions, x, x, torch.ones(9, size).npu(), 128, mrope_section=sections)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_clipped_swiglu_clips_the_gate_above_and_the_value_on_both_sides(dtype, interleaved):
    x = (torch.randn(3, 32) * 8).to(dtype)
    result = torch_npu.npu_clipped_swiglu(x.npu(), alpha=1.5, limit=5.0, bias=0.5, interleaved=interleaved)
    gate, value = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, -1)
    gate, value = gate.double().clamp(max=5), value.double().clamp(-5, 5)
    assert_near(result, gate * torch.sigmoid(1.5 * gate) * (value + 0.5))


def test_clipped_swiglu_computes_the_rows_of_the_groups():
    x, groups = torch.randn(2, 3, 32), torch.tensor([3, 1])
    result = torch_npu.npu_clipped_swiglu(x.npu(), group_index=groups.npu(), dim=-1)
    expected = torch_npu.npu_clipped_swiglu(x.npu(), dim=-1)
    assert result.view(6, 16)[:4].equal(expected.view(6, 16)[:4])
    assert not result.view(6, 16)[4:].equal(expected.view(6, 16)[4:])
