"""Gating of mixtures of experts on the host NPU, against its formula in float64."""

import math

import pytest
import torch
import torch_npu
from tests._values import assert_near, called

_TOKENS, _EXPERTS, _CHOICES = 7, 12, 3


def test_the_gating_chooses_the_largest_softmax():
    x = torch.randn(_TOKENS, _EXPERTS)
    weights, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(x.npu(), None, k=_CHOICES)
    values, indices = x.double().softmax(-1).topk(_CHOICES)
    assert_near(weights, values)
    assert experts.tolist() == indices.tolist()
    assert rows.tolist() == torch.arange(_TOKENS * _CHOICES).view(_CHOICES, _TOKENS).t().tolist()


@pytest.mark.parametrize("renorm", [0, 1])
def test_the_second_version_normalizes_before_or_after_the_choice(renorm):
    x = torch.randn(_TOKENS, _EXPERTS)
    weights, experts, softmax = torch_npu.npu_moe_gating_top_k_softmax_v2(
        x.npu(), k=_CHOICES, renorm=renorm, output_softmax=True
    )
    values, indices = x.double().topk(_CHOICES)
    assert_near(weights, values.softmax(-1) if renorm else x.double().softmax(-1).gather(-1, indices))
    assert experts.tolist() == indices.tolist()
    if not renorm:
        assert_near(softmax, x.double().softmax(-1))


_NORMS = [lambda x: x.softmax(-1), torch.sigmoid, lambda x: torch.nn.functional.softplus(x).sqrt()]


def _gated(x, bias, k, groups, kept, select, renorm, norm_type, scale, epsilon=1e-20):
    """Return the weights, the experts and the norm, computed expert by expert."""
    norm = _NORMS[norm_type](x)
    scores = norm if bias is None else norm + bias
    best = scores.unflatten(-1, (groups, -1)).topk(select + 1, -1)[0].sum(-1).topk(kept)[1]
    size = x.size(-1) // groups
    experts = []
    for token, kept_groups in enumerate(best.tolist()):
        candidates = [expert for group in kept_groups for expert in range(group * size, (group + 1) * size)]
        experts.append(sorted(candidates, key=lambda expert, token=token: -scores[token, expert])[:k])
    experts = torch.tensor(experts)
    weights = norm.gather(-1, experts)
    if norm_type or renorm:
        weights = weights / (weights.sum(-1, True) + epsilon)
    return weights * scale, experts, norm


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("groups", "kept", "select", "renorm", "norm_type"),
    # CANN's moe_gating_top_k_tiling.cpp supports norm 2 for one group only.
    [(1, 1, 0, 0, 2), *((*of, *by) for of in [(1, 1, 0), (4, 2, 0), (4, 2, 1)] for by in [(0, 0), (1, 0), (0, 1)])],
)
def test_the_gating_in_groups_is_its_formula(biased, groups, kept, select, renorm, norm_type):
    x, bias = torch.randn(_TOKENS, _EXPERTS), torch.randn(_EXPERTS) if biased else None
    options = {"k_group": kept, "group_count": groups, "group_select_mode": select, "routed_scaling_factor": 2.5}
    options |= {"bias": bias, "renorm": renorm, "norm_type": norm_type, "out_flag": True}
    weights, experts, norm = called(torch_npu.npu_moe_gating_top_k, x, _CHOICES, **options)
    wide_bias = None if bias is None else bias.double()
    expected = _gated(x.double(), wide_bias, _CHOICES, groups, kept, select, renorm, norm_type, 2.5)
    assert_near(weights, expected[0])
    assert experts.tolist() == expected[1].tolist()
    assert_near(norm, expected[2])


@pytest.mark.parametrize(("renorm", "norm_type"), [(0, 0), (1, 0), (0, 1)])
def test_the_gradient_of_the_gating_is_that_of_float64(renorm, norm_type):
    x = torch.randn(_TOKENS, _EXPERTS, dtype=torch.float64, requires_grad=True)
    weights, experts, norm = _gated(x, None, _CHOICES, 1, 1, 0, renorm, norm_type, 2.5)
    grad = torch.randn(_TOKENS, _CHOICES)
    weights.backward(grad.double())
    options = {"renorm": renorm, "norm_type": norm_type, "routed_scaling_factor": 2.5}
    given = norm.detach().float(), grad, experts.int()
    actual = called(torch_npu.npu_moe_gating_top_k_backward, *given, **options)
    assert_near(actual, x.grad)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"group_count": 5}, "12 experts are not group_count=5 equal groups"),
        ({"group_count": 4, "k_group": 5}, "k_group is 5 of 4 groups"),
        ({"group_count": 4, "k_group": 1, "k": 4}, "k is 4 of 3 experts"),
        ({"norm_type": 2, "group_count": 2}, "norm_type is 2 of 2 groups; CANN takes 0, 1, and 2 of one group"),
        ({"group_count": 2, "group_select_mode": 2}, "group_select_mode is 2"),
    ],
    ids=["groups", "too many groups", "too few experts", "norm", "select mode"],
)
def test_what_the_gating_does_not_take_is_refused_at_the_call(arguments, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_moe_gating_top_k(torch.randn(_TOKENS, _EXPERTS).npu(), **({"k": _CHOICES} | arguments))


@pytest.mark.parametrize("gating", [torch_npu.npu_moe_gating_top_k_softmax, torch_npu.npu_moe_gating_top_k_softmax_v2])
def test_a_finished_row_chooses_the_number_after_the_last_expert(gating):
    x, finished = torch.randn(_TOKENS, _EXPERTS), torch.arange(_TOKENS) % 2 == 0
    weights, experts, _ = gating(x.npu(), k=_CHOICES, finished=finished.npu())
    values, indices = x.double().softmax(-1).topk(_CHOICES)
    assert_near(weights, values)
    assert experts.cpu().equal(indices.masked_fill(finished.unsqueeze(-1), _EXPERTS).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", ["npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k"])
def test_of_experts_with_equal_scores_the_first_are_chosen(operator, dtype):
    x = torch.zeros(_TOKENS, _EXPERTS, dtype=dtype)
    x[:, 3::2] = 1
    experts = getattr(torch_npu, operator)(x.npu(), k=4)[1].cpu()
    assert experts.tolist() == [sorted(range(_EXPERTS), key=lambda one: (one < 3 or one % 2 == 0, one))[:4]] * _TOKENS


def _table(experts, most):
    """Return a table with the count of instances of each expert and their numbers."""
    counts = torch.randint(1, most + 1, (experts, 1), dtype=torch.int32)
    return torch.cat([counts, torch.stack([torch.randperm(32)[:most] for _ in range(experts)]).int()], 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", [0, 1])
def test_ranks_or_tokens_take_the_instances_of_an_expert_one_after_the_other(mode, dtype):
    ranks, table = 8, _table(_EXPERTS, 4)
    chosen = torch.randint(_EXPERTS, (_TOKENS, _CHOICES))
    for rank in range(ranks):
        instances, _ = torch_npu.npu_moe_update_expert(
            chosen.to(dtype).npu(), table.npu(), local_rank_id=rank, world_size=ranks, balance_mode=mode
        )
        assert instances.dtype == dtype
        for token, (row, found) in enumerate(zip(chosen.tolist(), instances.tolist(), strict=True)):
            for expert, instance in zip(row, found, strict=True):
                count, *numbers = table[expert].tolist()
                assert instance == numbers[token % count if mode else rank // math.ceil(ranks / count)]


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_choices_with_less_than_their_part_of_the_scales_are_not_active(dtype, has_mask):
    scales, threshold = torch.rand(_TOKENS, _CHOICES).to(dtype), torch.rand(1, _CHOICES)
    active = torch.arange(_TOKENS) < 5 if has_mask else None
    chosen = torch.zeros(_TOKENS, _CHOICES, dtype=torch.int32)
    _, kept = torch_npu.npu_moe_update_expert(
        chosen.npu(), _table(1, 1).npu(), expert_scales=scales.npu(), pruning_threshold=threshold.npu(),
        active_mask=active.npu() if has_mask else None, balance_mode=1,
    )  # fmt: skip
    wide = scales.double()
    expected = wide >= threshold * wide.sum(-1, True)
    assert kept.cpu().equal(expected & active[:, None] if has_mask else expected)
