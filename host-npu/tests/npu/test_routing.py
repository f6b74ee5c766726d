"""Routing of tokens to experts and back on the host NPU, against loops over the rows."""

import pytest
import torch
import torch_npu
from tests._values import assert_rows_quantized, called, refused

_TOKENS, _CHOICES, _EXPERTS, _SIZE = 7, 3, 6, 16


def _experts():
    return torch.rand(_TOKENS, _EXPERTS).argsort(-1)[:, :_CHOICES].int()


def _sorted_choices(experts, first=0, last=_EXPERTS):
    """Return the choices of all tokens that are for these experts, sorted by expert and then by token."""
    choices = [(expert, place) for place, expert in enumerate(experts.flatten().tolist()) if first <= expert < last]
    return [place for _, place in sorted(choices)]


def _places(order, count):
    return [order.index(place) if place in order else -1 for place in range(count)]


def _route(x, experts, **arguments):
    options = {"active_num": experts.numel(), "expert_num": _EXPERTS, "active_expert_range": [0, _EXPERTS]}
    options |= {"expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1}
    return called(torch_npu.npu_moe_init_routing_v2, x, experts, **options | arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("active", [(0, _EXPERTS), (2, 5)], ids=["all", "a range"])
def test_rows_are_in_the_order_of_the_active_experts(active, dtype):
    x, experts = (torch.randn(_TOKENS, _SIZE) * 50).to(dtype), _experts()
    rows, places, counts, _ = _route(x, experts, active_expert_range=list(active))
    order = _sorted_choices(experts, *active)
    assert rows[: len(order)].cpu().equal(x[torch.tensor(order) // _CHOICES])
    assert places.tolist() == _places(order, experts.numel())
    assert counts.tolist() == [(experts == expert).sum() for expert in range(*active)]


def test_the_scale_of_a_token_goes_with_its_rows():
    x, experts, scale = torch.randn(_TOKENS, _SIZE), _experts(), torch.rand(_TOKENS)
    *_, rows = _route(x, experts, scale=scale.npu())
    assert rows.cpu().equal(scale[torch.tensor(_sorted_choices(experts)) // _CHOICES])


def test_the_index_of_type_1_says_where_a_row_comes_from():
    experts = _experts()
    _, sources, _, _ = _route(torch.randn(_TOKENS, _SIZE), experts, row_idx_type=1)
    assert sources.tolist() == _sorted_choices(experts)


def test_the_index_of_type_1_ends_with_the_experts_behind_the_range_and_those_before_it():
    experts = _experts()
    _, sources, *_ = _route(torch.randn(_TOKENS, _SIZE), experts, row_idx_type=1, active_expert_range=[2, 4])
    before = [place for place, expert in enumerate(experts.flatten().tolist()) if expert < 2]
    assert sources.tolist() == _sorted_choices(experts, 2) + before


@pytest.mark.parametrize("kind", [0, 2], ids=["sums", "pairs"])
def test_the_numbers_of_tokens_have_three_forms(kind):
    experts = _experts().clamp(max=_EXPERTS - 2)
    _, _, numbers, _ = _route(torch.randn(_TOKENS, _SIZE), experts, expert_tokens_num_type=kind)
    counts = [(experts == expert).sum().item() for expert in range(_EXPERTS)]
    pairs = [[expert, count] for expert, count in enumerate(counts) if count]
    pairs += [[0, 0]] * (_EXPERTS - len(pairs))
    assert numbers.tolist() == (torch.tensor(counts).cumsum(0).tolist() if kind == 0 else pairs)


@pytest.mark.parametrize("smooth", [False, True])
def test_rows_are_quantized_by_their_largest_number(smooth):
    x, experts = torch.randn(_TOKENS, _SIZE), _experts()
    by_expert = torch.rand(_EXPERTS, _SIZE)
    arguments = {"scale": by_expert.npu()} if smooth else {}
    rows, _, _, scale = _route(x, experts, quant_mode=1, **arguments)
    order = torch.tensor(_sorted_choices(experts))
    exact = x[order // _CHOICES].double()
    if smooth:
        exact = exact * by_expert[experts.flatten()[order].long()].double()
    assert_rows_quantized(rows, scale, exact)


def test_an_expert_drops_what_its_capacity_has_no_room_for():
    x, experts, capacity = torch.randn(_TOKENS, _SIZE), _experts(), 2
    rows, places, _, _ = _route(x, experts, drop_pad_mode=1, expert_capacity=capacity)
    expected, slots = torch.zeros(_EXPERTS, capacity, _SIZE), [-1] * experts.numel()
    taken = [0] * _EXPERTS
    for choice, expert in enumerate(experts.flatten().tolist()):
        if taken[expert] < capacity:
            expected[expert, taken[expert]] = x[choice // _CHOICES]
            slots[choice] = expert * capacity + taken[expert]
            taken[expert] += 1
    assert rows.cpu().equal(expected)
    assert places.tolist() == slots


def test_the_first_version_numbers_the_rows_by_columns():
    x, experts = torch.randn(_TOKENS, _SIZE), _experts()
    numbers = torch.arange(experts.numel(), dtype=torch.int32).view(_CHOICES, _TOKENS).t().contiguous()
    rows, places, by_expert = torch_npu.npu_moe_init_routing(x.npu(), numbers.npu(), experts.npu(), _TOKENS)
    order = experts.flatten().sort(stable=True)[1]
    assert rows.cpu().equal(x[order // _CHOICES])
    assert by_expert.tolist() == experts.flatten()[order].tolist()
    assert places[numbers.flatten()[order].long().npu()].tolist() == list(range(experts.numel()))


@pytest.mark.parametrize("shift", [1000, -1])
def test_numbers_of_rows_that_there_are_not_end_the_first_version(shift):
    x, experts = torch.randn(_TOKENS, _SIZE), _experts()
    numbers = torch.arange(experts.numel(), dtype=torch.int32).view(_CHOICES, _TOKENS).t().contiguous() + shift
    with refused(rf"rowIdx has the index {shift}; CANN takes 0 to {experts.numel() - 1}"):
        torch_npu.npu_moe_init_routing(x.npu(), numbers.npu(), experts.npu(), _TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [0, 2], ids=["by columns", "by rows"])
def test_the_rows_of_a_token_come_back_as_their_weighted_sum(mode, dtype):
    rows, experts = torch.randn(_TOKENS * _CHOICES, _SIZE).to(dtype), _experts()
    skips = [torch.randn(_TOKENS, _SIZE).to(dtype) for _ in range(2)]
    bias, scales = torch.randn(_EXPERTS, _SIZE).to(dtype), torch.rand(_TOKENS, _CHOICES).to(dtype)
    places = torch.randperm(_TOKENS * _CHOICES, dtype=torch.int32)
    result = called(torch_npu.npu_moe_finalize_routing, rows, *skips, bias, scales, places, experts, drop_pad_mode=mode)
    by_token = places.view(_CHOICES, _TOKENS).t() if mode == 0 else places.view(_TOKENS, _CHOICES)
    each = rows.double()[by_token.long()] + bias.double()[experts.long()]
    expected = (each * scales.double()[..., None]).sum(1) + skips[0].double() + skips[1].double()
    limit = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype] * expected.abs().max()
    assert (result.cpu().double() - expected).abs().max() <= limit


def test_routing_and_its_sums_give_the_token_back():
    x, experts = torch.randn(_TOKENS, _SIZE), _experts()
    weights = torch.rand(_TOKENS, _CHOICES).softmax(-1)
    rows, places, _, _ = _route(x, experts)
    result = torch_npu.npu_moe_finalize_routing(rows, None, None, None, weights.npu(), places, None, drop_pad_mode=2)
    torch.testing.assert_close(result.cpu(), x)


def test_dropped_rows_count_nothing():
    x, experts = torch.randn(_TOKENS, _SIZE), torch.zeros(_TOKENS, 1, dtype=torch.int32)
    rows, places, _, _ = _route(x, experts, drop_pad_mode=1, expert_capacity=2)
    scales = torch.ones(_TOKENS, 1)
    result = torch_npu.npu_moe_finalize_routing(rows, None, None, None, scales.npu(), places, None, drop_pad_mode=3)
    assert result.cpu().equal(torch.cat([x[:2], torch.zeros(_TOKENS - 2, _SIZE)]))


def test_the_ends_of_the_experts_are_counted():
    experts = torch.tensor([0, 0, 2, 2, 2, 4], dtype=torch.int32)
    assert torch_npu.npu_moe_compute_expert_tokens(experts.npu(), 6).tolist() == [2, 2, 5, 5, 6, 6]


@pytest.mark.parametrize("index_type", [0, 1])
def test_the_rows_of_all_ranks_are_sorted_by_expert(index_type):
    counts = torch.tensor([[2, 0, 3], [1, 2, 1]], dtype=torch.int32)
    tokens, scales = torch.randn(9, _SIZE).half(), torch.rand(9)
    result = torch_npu.npu_moe_re_routing(
        tokens.npu(), counts.npu(), per_token_scales=scales.npu(), idx_type=index_type
    )
    order = torch.tensor([0, 1, 5, 6, 7, 2, 3, 4, 8])
    assert result[0].cpu().equal(tokens[order])
    assert result[1].cpu().equal(scales[order])
    assert result[2].tolist() == (order if index_type == 0 else order.argsort()).tolist()
    assert result[3].tolist() == [3, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"active_num": 5}, "routes all choices, not 5 of 21"),
        ({"active_expert_range": [3, 3]}, r"active_expert_range"),
        ({"drop_pad_mode": 1, "expert_capacity": 2, "row_idx_type": 1}, "row_idx_type 0 only"),
    ],
    ids=["active_num", "range", "padded"],
)
def test_what_the_routing_does_not_take_is_refused_at_the_call(arguments, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        _route(torch.randn(_TOKENS, _SIZE), _experts(), **arguments)


@pytest.mark.parametrize("outside", [-1, _EXPERTS])
def test_an_expert_that_is_not_there_is_a_fault(outside):
    experts = _experts()
    experts[2, 1] = outside
    with refused(f"expertIdx has the index {outside}; CANN takes 0 to {_EXPERTS - 1}"):
        _route(torch.randn(_TOKENS, _SIZE), experts)
    rows = torch.zeros(experts.numel(), _SIZE)
    scales = torch.rand(experts.shape)
    arguments = [rows, None, None, rows[:_EXPERTS], scales, torch.arange(experts.numel()).int(), experts.int()]
    with refused(f"expertIdx has the index {outside}; CANN takes 0 to {_EXPERTS - 1}"):
        torch_npu.npu_moe_finalize_routing(*[each if each is None else each.npu() for each in arguments])
