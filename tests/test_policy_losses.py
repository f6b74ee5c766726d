"""Policy losses: the formulas of their papers, and TRL's weights."""

import math
from functools import partial

from torch_aclnn_ops import functional as F

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

SEQUENCES, TOKENS = 6, 5


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = (torch.arange(TOKENS) < torch.tensor([5, 4, 3, 2, 1, 0]).unsqueeze(1)).double()


def variant(loss_type, tokens, *, cap=math.inf, is_sequence=False, beta=0.0, is_corrected=False, numbers=None):
    """Return the loss of one sequence's tokens by the papers' formulas, token by token."""
    policy, old, sampler, reference, advantages = tokens
    number = max(len(policy), 1)
    ratios = [(p - o).exp() for p, o in zip(policy, old, strict=True)]
    if is_sequence:
        ratios = [math.prod(ratios) ** (1 / number)] * len(policy)
    trust = [min((o - s).exp(), torch.tensor(cap).double()) for o, s in zip(old, sampler, strict=True)]
    weight = math.prod([r.detach() * t for r, t in zip(ratios, trust, strict=True)])
    losses = []
    for p, r, t, q, a in zip(policy, ratios, trust, reference, advantages, strict=True):
        if loss_type == "clip":
            high, delta = (1.2, math.inf) if numbers is None else numbers
            loss = -torch.minimum(r.clamp(max=delta) * a, r.clamp(0.8, high) * a) * t
        elif loss_type == "cispo":
            loss = -r.detach().clamp(max=numbers) * a * p * t
        elif loss_type == "sapo":
            temperature = numbers[0] if a > 0 else numbers[1]
            loss = -4 / temperature / (1 + (temperature * (1 - r)).exp()) * a * t
        else:
            power, rate = numbers[:2] if a >= 0 else numbers[2:]
            loss = -math.exp(rate) * weight**power * (-rate * weight).exp() * a * p
        divergence = (q - p).exp() - (q - p) - 1
        losses.append(loss + beta * divergence * (r if is_corrected else 1))
    return losses


VARIANTS = {
    "CISPO": ("cispo", {"delta": 1.3}, {"numbers": 1.3}),
    "CISPO of sequences": ("cispo", {"delta": 1.1, "importance": "sequence"}, {"numbers": 1.1, "is_sequence": True}),
    "SAPO": ("sapo", {}, {"numbers": (1.0, 1.05)}),
    "SAPO of sequences": (
        "sapo",
        {"sapo_temperatures": (0.8, 1.7), "importance": "sequence"},
        {"numbers": (0.8, 1.7), "is_sequence": True},
    ),
    "VESPO": ("vespo", {}, {"numbers": (2.0, 3.0, 3.0, 2.0)}),
    "VESPO of another shape": ("vespo", {"vespo_shape": (0.5, 1.5, 1.2, 0.3)}, {"numbers": (0.5, 1.5, 1.2, 0.3)}),
    "LUSPO": ("clip", {"importance": "sequence", "reduction": "constant", "length": 1}, {"is_sequence": True}),
    "GRPO": ("clip", {}, {}),
    "GRPO of other bounds": ("clip", {"epsilon_high": 0.28, "delta": 1.5}, {"numbers": (1.28, 1.5)}),
}
CORRECTIONS = {
    "no correction": ({}, {}),
    "sampler": ({"sampler_cap": 1.2}, {"cap": 1.2}),
    "KL": ({"beta": 0.3}, {"beta": 0.3}),
    "corrected KL": ({"beta": 0.3, "is_kl_corrected": True}, {"beta": 0.3, "is_corrected": True}),
}


def four_log_probs():
    """Return log-probabilities under the policy, the old one, the sampler and the reference, and advantages."""
    policy = -draw(SEQUENCES, TOKENS, seed=1).abs()
    others = [policy + scale * draw(SEQUENCES, TOKENS, seed=seed) for scale, seed in ((0.4, 2), (0.5, 3), (0.6, 4))]
    return [policy.requires_grad_(), others[0].detach(), others[1].detach(), others[2].detach()]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_the_formula_of_its_paper(name, correction):
    loss_type, options, of_formula = VARIANTS[name]
    more, of_correction = CORRECTIONS[correction]
    (policy, old, sampler, reference), advantages = four_log_probs(), draw(SEQUENCES, seed=5)
    sampler = sampler if correction == "sampler" else None
    losses = [
        variant(
            loss_type,
            [one[row][MASK[row] == 1] for one in (policy, old, old if sampler is None else sampler, reference)]
            + [advantages[row].repeat(int(MASK[row].sum()))],
            **of_formula,
            **of_correction,
        )
        for row in range(SEQUENCES)
    ]
    of_sequences = [sum(row, torch.zeros(()).double()) / (1 if name == "LUSPO" else max(len(row), 1)) for row in losses]
    expected = torch.stack(of_sequences).mean()

    def loss(policy, **reduction):
        tensors = {"old_log_probs": old, "reference_log_probs": reference, "sampler_log_probs": sampler}
        return F.grpo_loss(policy, advantages, MASK, loss_type=loss_type, **tensors, **{**options, **more, **reduction})

    found = loss(policy)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, policy), torch.autograd.grad(expected, policy))
    of_tokens = torch.zeros_like(MASK).masked_scatter(MASK == 1, torch.stack([one for row in losses for one in row]))
    torch.testing.assert_close(loss(policy, reduction="none", length=None), of_tokens)
    torch.testing.assert_close(loss(policy, reduction="token", length=None), of_tokens.sum() / MASK.sum())
    torch.testing.assert_close(loss(policy, reduction="constant", length=7), of_tokens.sum() / (SEQUENCES * 7))


@pytest.mark.parametrize("name", ["SAPO", "SAPO of sequences", "LUSPO"])
def test_a_variant_whose_ratio_has_a_gradient_passes_gradcheck(name):
    loss_type, options, _ = VARIANTS[name]
    policy, old, _, reference = four_log_probs()
    more = {"old_log_probs": old, "reference_log_probs": reference, "beta": 0.3, "is_kl_corrected": True, **options}
    function = partial(F.grpo_loss, advantages=draw(SEQUENCES, seed=5), mask=MASK, loss_type=loss_type, **more)
    assert gradcheck(function, [policy]) and gradgradcheck(function, [policy])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_compiles_and_16_bits_are_computed_in_float32(name):
    loss_type, options, _ = VARIANTS[name]
    given = [one.detach().bfloat16() for one in four_log_probs()]
    names = ("old_log_probs", "sampler_log_probs", "reference_log_probs")

    def loss(policy, *others):
        tensors = dict(zip(names, others, strict=True))
        return F.grpo_loss(policy, draw(SEQUENCES, seed=5).float(), MASK, loss_type=loss_type, **tensors, **options)

    expected = loss(*(one.float() for one in given))
    assert loss(*given) == expected and expected.dtype == torch.float32
    tensors = dict(zip(names, given[1:], strict=True))
    function = partial(F.grpo_loss, mask=MASK, loss_type=loss_type, **options)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(given[0], draw(SEQUENCES, seed=5).float(), **tensors), expected)


def test_the_weights_of_vespo_are_those_of_trl():
    trainer = pytest.importorskip("trl", minversion="1.16").GRPOTrainer
    (policy, old, sampler, _), advantages = four_log_probs(), draw(SEQUENCES, 1, seed=5)
    ratios = ((old - sampler) * MASK).exp().clamp(max=1.2)
    weights = trainer.get_gamma_weights(advantages, policy.detach() - old, MASK, ratios)
    found = F.grpo_loss(
        *(policy, advantages[:, 0], MASK),
        old_log_probs=old,
        sampler_log_probs=sampler,
        sampler_cap=1.2,
        loss_type="vespo",
        reduction="none",
    )
    torch.testing.assert_close(found, -weights * advantages * policy * MASK)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_the_weight_of_vespo_is_finite_for_any_ratio(advantage):
    policy = torch.tensor([[-1e4, 0.0], [0.0, 0.0], [0.0, -1e4]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0], [-1e4, -1e4], [-1e4, 0.0]])
    loss = F.grpo_loss(policy, torch.full((3,), advantage), MASK[:3, :2], old_log_probs=old, loss_type="vespo")
    assert loss.isfinite() and torch.autograd.grad(loss, policy)[0].isfinite().all()


@pytest.mark.parametrize("loss_type", ["clip", "vespo"])
def test_masked_tokens_do_not_matter_where_the_ratio_of_the_sampler_is_capped_below_1(loss_type):
    policy, old, sampler = draw(1, 2, seed=1), draw(1, 2, seed=2), draw(1, 2, seed=3)
    losses = []
    for masked in (0, 7):
        mask = torch.ones(1, 2 + masked).double()
        mask[:, 2:] = 0
        tensors = (torch.nn.functional.pad(one, (0, masked)) for one in (policy, old, sampler))
        padded, *others = tensors
        names = dict(zip(("old_log_probs", "sampler_log_probs"), others, strict=True))
        losses.append(F.grpo_loss(padded, torch.ones(1), mask, **names, sampler_cap=0.5, loss_type=loss_type))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("number", [24, 24.0, torch.tensor(24), torch.tensor([24.0]).double()], ids=repr)
def test_the_number_of_tokens_may_be_that_of_a_larger_batch(number):
    policy, advantages = draw(SEQUENCES, TOKENS, seed=1).float(), draw(SEQUENCES, seed=4).float()
    found = F.grpo_loss(policy, advantages, MASK, reduction="token", num_items_in_batch=number)
    expected = F.grpo_loss(policy, advantages, MASK, reduction="none").sum() / 24
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_the_older_policy_is_the_current_one_by_default():
    policy, advantages = draw(SEQUENCES, TOKENS, seed=1).requires_grad_(), draw(SEQUENCES, seed=4)
    losses = [F.grpo_loss(policy, advantages, MASK, old_log_probs=old) for old in (None, policy.detach())]
    torch.testing.assert_close(*(torch.autograd.grad(loss, policy) for loss in losses))


def test_advantages_may_be_those_of_tokens():
    policy, advantages = draw(SEQUENCES, TOKENS, seed=1), draw(SEQUENCES, seed=4)
    of_tokens = advantages.unsqueeze(1).expand(SEQUENCES, TOKENS)
    assert F.grpo_loss(policy, of_tokens, MASK) == F.grpo_loss(policy, advantages, MASK)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16], ids=str)
def test_a_mask_may_have_any_dtype(dtype):
    policy, advantages = draw(SEQUENCES, TOKENS, seed=1), draw(SEQUENCES, seed=4)
    assert F.grpo_loss(policy, advantages, MASK.to(dtype)) == F.grpo_loss(policy, advantages, MASK)


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_what_is_not_finite_at_a_masked_token_stays_there(wrong, importance):
    tensors = [draw(SEQUENCES, TOKENS, seed=seed) for seed in (1, 2, 3)]

    def loss_and_gradient():
        policy, old, advantages = tensors
        policy = policy.clone().requires_grad_()
        loss = F.grpo_loss(policy, advantages, MASK, old_log_probs=old, importance=importance)
        return loss, *torch.autograd.grad(loss, policy)

    expected = loss_and_gradient()
    for tensor in tensors:
        tensor[MASK == 0] = wrong
    torch.testing.assert_close(loss_and_gradient(), expected)


ONE, TOKEN = torch.zeros(2), torch.zeros(2, 3)
GRAD = torch.zeros(2, 3, requires_grad=True)


def _call(log_probs=TOKEN, advantages=ONE, mask=TOKEN, **options):
    return log_probs, advantages, mask, options


ERROR_INPUTS = [
    (_call(GRAD, old_log_probs=GRAD), "old_log_probs must not require grad, because the older policy gets no gradient"),
    (_call(GRAD, reference_log_probs=GRAD, beta=0.1), "reference_log_probs must not require grad, because a reference"),
    (_call(GRAD, sampler_log_probs=GRAD), "sampler_log_probs must not require grad, .* pass sampler_log_probs.detach"),
    (_call(TOKEN.long()), "log_probs must have a floating-point dtype, but it has"),
    (_call(ONE, ONE, ONE), r"log_probs must have shape \(B, T\), but its shape is \[2\]"),
    (_call(advantages=None), "advantages must be a Tensor, but it is None"),
    (_call(advantages=ONE[:1]), r"advantages must have shape \[2\] or \[2, 3\]"),
    (_call(mask=ONE), r"mask must have shape \[2, 3\], as log_probs has"),
    (_call(mask=TOKEN - 100), "mask must be bool, or have only 0 and 1, but it has -100.0"),
    (_call(mask=TOKEN + math.nan), "mask must be bool, or have only 0 and 1, but it has nan"),
    (_call(beta=0.1), "reference_log_probs must be given where beta is"),
    (_call(loss_type="dapo"), "loss_type must be one of 'clip', 'cispo', 'sapo', 'vespo', but it is 'dapo'"),
    (_call(loss_type="cispo"), "delta must be a number with loss_type 'cispo', but it is None"),
    (_call(loss_type="cispo", epsilon=0.1), "epsilon must be .*, the default, with loss_type 'cispo', but it is"),
    (_call(loss_type="cispo", epsilon_high=5.0), "epsilon_high must be .*, the default, with loss_type 'cispo'"),
    (_call(loss_type="sapo", delta=2.0), "delta must be .*, the default, with loss_type 'sapo', but it is"),
    (_call(loss_type="vespo", importance="sequence"), "importance must be .*, the default, with loss_type 'vespo'"),
    (_call(sapo_temperatures=(1.0, 1.1)), "sapo_temperatures must be .*, the default, with loss_type 'clip'"),
    (_call(loss_type="sapo", vespo_shape=(1.0,) * 4), "vespo_shape must be .*, the default, with loss_type 'sapo'"),
    (_call(sampler_cap=0.0), "sampler_cap must be positive and finite, but it is"),
    (_call(sapo_temperatures=(1.0,)), "sapo_temperatures must be a tuple of 2 numbers, but it is"),
    (_call(sapo_temperatures=(1.0, 0.0)), "sapo_temperatures must be positive and finite, but it is"),
    (_call(vespo_shape=(1.0, 1.0, 1.0, True)), "vespo_shape must be a number, but it is"),
    (_call(is_kl_corrected=1), "is_kl_corrected must be a bool, but it is"),
    (_call(num_items_in_batch=3), 'num_items_in_batch must be None unless reduction is "token", but it is'),
    (_call(reduction="token", num_items_in_batch=torch.tensor(0)), "num_items_in_batch must be positive and finite"),
    (_call(reduction="token", num_items_in_batch=True), "num_items_in_batch must be a number, but"),
    (_call(reduction="token", num_items_in_batch=ONE), "num_items_in_batch must be a number or have one element, but"),
    (_call(importance="x"), "importance must be one of 'token', 'seq"),
    (_call(reduction="constant"), "length must be given"),
    (_call(reduction="constant", length=0), "length must be at least 1, but it is 0$"),
    (_call(reduction="constant", length=2.5), "length must be an int, but it is 2.5$"),
    (_call(epsilon=None), "epsilon must be a number, but it is None"),
    *[(_call(**{name: -1.0}), f"{name} must be at least 0 and finite") for name in ("beta", "epsilon_high", "delta")],
]


@pytest.mark.parametrize(("call", "message"), ERROR_INPUTS, ids=[message for _, message in ERROR_INPUTS])
def test_invalid_arguments_raise_a_clear_error(call, message):
    *tensors, options = call
    with pytest.raises((RuntimeError, TypeError, ValueError), match=f"^grpo_loss: {message}"):
        F.grpo_loss(*tensors, **options)
