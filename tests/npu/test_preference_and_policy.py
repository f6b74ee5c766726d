"""Losses of preferences and policies on an NPU: the values and gradients of a CPU."""

from functools import partial

from torch_aclnn_ops import functional as F

import pytest
import torch

SEQUENCES, TOKENS = 4, 6
MASK = torch.arange(TOKENS) < torch.tensor([[6], [3], [1], [0]])
DPO = {name: {} for name in "sigmoid hinge ipo nca_pair bco_pair sppo_hard apo_zero apo_down discopop".split()}
DPO |= {name: {"label_smoothing": 0.1} for name in ("robust", "exo_pair")}
GRPO = {
    "clip": {"delta": 1.5, "beta": 0.1},
    "sequences": {"importance": "sequence", "epsilon_high": 0.3},
    "LUSPO": {"importance": "sequence", "reduction": "constant", "length": 1},
    "cispo": {"loss_type": "cispo", "delta": 1.3},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo", "beta": 0.1, "is_kl_corrected": True},
    "not reduced": {"reduction": "none"},
    "of a batch": {"reduction": "token", "num_items_in_batch": 20.0},
}


def _draw(*shape, seed):
    return -torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).abs()


def _dpo(device, dtype, **options):
    policy, *others = [_draw(SEQUENCES, seed=seed).to(device, dtype) for seed in range(4)]
    policy.requires_grad_()
    return policy, F.dpo_loss(policy, *others, beta=0.3, **options)


def _kto(device, dtype, **options):
    policy, reference = [_draw(SEQUENCES, seed=seed).to(device, dtype) for seed in range(2)]
    policy.requires_grad_()
    desirable = torch.tensor([True, False, False, True], device=device)
    return policy, F.kto_loss(policy, reference, desirable, torch.tensor(-0.2, device=device), **options)


def _grpo(device, dtype, **options):
    policy, old, reference, sampler = [_draw(SEQUENCES, TOKENS, seed=seed).to(device, dtype) for seed in range(4)]
    policy.requires_grad_()
    others = {"old_log_probs": old, "reference_log_probs": reference, "sampler_log_probs": sampler}
    advantages = torch.linspace(-1, 1, SEQUENCES, device=device)
    return policy, F.grpo_loss(policy, advantages, MASK.to(device), **others, **options)


LOSSES = {
    **{f"dpo, {name}": partial(_dpo, loss_type=name, **options) for name, options in DPO.items()},
    **{f"kto, {clamped}": partial(_kto, clamp_kl=clamped) for clamped in (True, False)},
    **{f"grpo, {name}": partial(_grpo, **options) for name, options in GRPO.items()},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_loss_and_its_gradient_are_those_of_a_cpu(loss, dtype):
    found = []
    for device in ("npu", "cpu"):
        policy, value = loss(device, dtype)
        [gradient] = torch.autograd.grad(value.sum(), policy)
        found.append((value.detach().cpu(), gradient.cpu()))
    torch.testing.assert_close(*found, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-5)
