"""Losses of policies: the formula of TRL's GRPOTrainer, written out in torch."""

import math

from torch_aclnn_ops import functional as F

import pytest
import torch

SEQUENCES, TOKENS = 6, 5


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grpo(policy, advantages, mask, old, reference, beta, low, high, delta, importance, reduction, length):
    """The loss of TRL's GRPOTrainer."""
    log_ratio = policy - (policy.detach() if old is None else old)
    if importance == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - low, 1 + high)
    if delta is not None:
        coef_1 = torch.clamp(coef_1, max=delta)
    per_token_loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    if beta != 0.0:
        per_token_kl = torch.exp(reference - policy) - (reference - policy) - 1
        per_token_loss = per_token_loss + beta * per_token_kl
    if reduction == "sequence":
        return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if reduction == "token":
        return (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)
    return (per_token_loss * mask).sum() / (per_token_loss.size(0) * length)


MASK = (torch.arange(TOKENS) < torch.tensor([5, 4, 3, 2, 1, 0]).unsqueeze(1)).double()


@pytest.mark.parametrize("reduction", ["sequence", "token", "constant"])
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 1.5])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("is_old", [False, True], ids=["of this policy", "of an older policy"])
def test_grpo_is_trls_formula(is_old, beta, delta, importance, reduction):
    policy = draw(SEQUENCES, TOKENS, seed=1).requires_grad_()
    old = draw(SEQUENCES, TOKENS, seed=2) if is_old else None
    reference, advantages = draw(SEQUENCES, TOKENS, seed=3), draw(SEQUENCES, seed=4)
    length = 7 if reduction == "constant" else None
    expected = grpo(policy, advantages, MASK, old, reference, beta, 0.2, 0.28, delta, importance, reduction, length)
    found = F.grpo_loss(
        *(policy, advantages, MASK),
        old_log_probs=old,
        reference_log_probs=reference,
        beta=beta,
        epsilon_high=0.28,
        delta=delta,
        importance=importance,
        reduction=reduction,
        length=length,
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, policy), torch.autograd.grad(expected, policy))


def test_advantages_may_be_those_of_tokens():
    policy, advantages = draw(SEQUENCES, TOKENS, seed=1), draw(SEQUENCES, seed=4)
    of_tokens = advantages.unsqueeze(1).expand(SEQUENCES, TOKENS)
    assert F.grpo_loss(policy, of_tokens, MASK) == F.grpo_loss(policy, advantages, MASK)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16], ids=str)
def test_a_mask_may_have_any_dtype(dtype):
    policy, advantages = draw(SEQUENCES, TOKENS, seed=1), draw(SEQUENCES, seed=4)
    assert F.grpo_loss(policy, advantages, MASK.to(dtype)) == F.grpo_loss(policy, advantages, MASK)


def test_what_is_not_finite_at_a_masked_token_stays_there():
    policy, old = draw(SEQUENCES, TOKENS, seed=1), draw(SEQUENCES, TOKENS, seed=2)
    expected = F.grpo_loss(policy, draw(SEQUENCES), MASK, old_log_probs=old)
    policy[5, 0], old[4, 3] = -math.inf, math.nan
    policy.requires_grad_()
    found = F.grpo_loss(policy, draw(SEQUENCES), MASK, old_log_probs=old)
    assert found == expected and torch.autograd.grad(found, policy)[0].isfinite().all()


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [math.inf, math.nan])
def test_an_advantage_that_is_not_finite_at_a_masked_token_stays_there(advantage, importance):
    policy, advantages = draw(SEQUENCES, TOKENS, seed=1).requires_grad_(), draw(SEQUENCES, TOKENS, seed=4)
    expected = torch.autograd.grad(F.grpo_loss(policy, advantages, MASK, importance=importance), policy)
    advantages[MASK == 0] = advantage
    found = torch.autograd.grad(F.grpo_loss(policy, advantages, MASK, importance=importance), policy)
    torch.testing.assert_close(found, expected)


ONE, TOKEN = torch.zeros(2), torch.zeros(2, 3)
GRAD = torch.zeros(2, 3, requires_grad=True)
ERROR_INPUTS = {
    "old_log_probs that require grad": (
        lambda: F.grpo_loss(GRAD, ONE, TOKEN, old_log_probs=GRAD),
        "old_log_probs must not require grad, because the older policy gets no gradient.* pass old_log_probs.detach()",
    ),
    "reference_log_probs that require grad": (
        lambda: F.grpo_loss(GRAD, ONE, TOKEN, reference_log_probs=GRAD, beta=0.1),
        "reference_log_probs must not require grad, because a reference gets no .* pass reference_log_probs.detach()",
    ),
    "integers": (
        lambda: F.grpo_loss(TOKEN.long(), ONE, TOKEN),
        "log_probs must have a floating-point dtype, but it has",
    ),
    "one sequence": (lambda: F.grpo_loss(ONE, ONE, ONE), r"log_probs must have shape \(B, T\), but its shape is \[2\]"),
    "epsilon": (lambda: F.grpo_loss(TOKEN, ONE, TOKEN, epsilon=-0.2), "epsilon must be at least 0 and finite, but it"),
    "no advantages": (lambda: F.grpo_loss(TOKEN, None, TOKEN), "advantages must be a Tensor, but it is None"),
    "advantages": (lambda: F.grpo_loss(TOKEN, ONE[:1], TOKEN), r"advantages must have shape \[2\] or \[2, 3\]"),
    "mask": (lambda: F.grpo_loss(TOKEN, ONE, ONE), r"mask must have shape \[2, 3\], as log_probs has"),
    **{
        f"mask with {number}": (
            lambda number=number: F.grpo_loss(TOKEN, ONE, TOKEN + number),
            f"mask must be bool, or have only 0 and 1, but it has {number}",
        )
        for number in (-100.0, 0.5, math.nan)
    },
    "reference": (lambda: F.grpo_loss(TOKEN, ONE, TOKEN, beta=0.1), "reference_log_probs must be given where beta is"),
    "importance": (lambda: F.grpo_loss(TOKEN, ONE, TOKEN, importance="x"), "importance must be one of 'token', 'seq"),
    "length": (lambda: F.grpo_loss(TOKEN, ONE, TOKEN, reduction="constant"), "length must be given"),
    **{
        f"length of {length}": (
            lambda length=length: F.grpo_loss(TOKEN, ONE, TOKEN, reduction="constant", length=length),
            f"length must be {accepted}, but it is {length}$",
        )
        for accepted, lengths in {"at least 1": (0, -5), "an int": (2.5, True)}.items()
        for length in lengths
    },
    **{
        f"{name} of {value}": (
            lambda name=name, value=value: F.grpo_loss(TOKEN, ONE, TOKEN, **{name: value}),
            f"{name} must be {accepted}, but it is {value}$",
        )
        for accepted, values in {"at least 0 and finite": (-1.0, math.inf, math.nan), "a number": (True,)}.items()
        for name in ("beta", "epsilon", "epsilon_high", "delta")
        for value in values
    },
}


@pytest.mark.parametrize("name", ERROR_INPUTS)
def test_invalid_arguments_raise_a_clear_error(name):
    call, message = ERROR_INPUTS[name]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=f"^\\w+: {message}"):
        call()
