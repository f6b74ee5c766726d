"""Optimizer steps and the step of a decoder on the host NPU."""

import pytest
import torch
import torch_npu


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=["", "amsgrad", "maximize"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_adamw_is_adamw(dtype, options):
    start = torch.randn(7, 3).to(dtype)
    on_npu, reference = torch.nn.Parameter(start.npu()), torch.nn.Parameter(start.double())
    optimizers = [
        torch.optim.AdamW([on_npu], lr=0.1, weight_decay=0.3, fused=True, **options),
        torch.optim.AdamW([reference], lr=0.1, weight_decay=0.3, **options),
    ]
    for _ in range(3):
        grad = torch.randn(7, 3).to(dtype)
        on_npu.grad, reference.grad = grad.npu(), grad.double()
        for optimizer in optimizers:
            optimizer.step()
    limit = {torch.float32: 2e-6, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(on_npu.detach().cpu().double(), reference.detach(), rtol=limit, atol=limit)


_OF_TORCH_NPU = {
    "NpuFusedAdam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "NpuFusedAdamW": (torch.optim.AdamW, {"weight_decay": 0.3}),
    "NpuFusedRMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
    "NpuFusedSGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", _OF_TORCH_NPU)
def test_the_optimizers_of_torch_npu_are_torchs(name):
    kind, options = _OF_TORCH_NPU[name]
    starts = [torch.randn(7, 3), torch.randn(5)]
    on_npu = [torch.nn.Parameter(each.npu()) for each in starts]
    references = [torch.nn.Parameter(each.double()) for each in starts]
    optimizers = [getattr(torch_npu.optim, name)(on_npu, lr=0.1, **options), kind(references, lr=0.1, **options)]
    for _ in range(3):
        grads = [torch.randn_like(each) for each in starts]
        for side, optimizer in zip((on_npu, references), optimizers, strict=True):
            # They keep all gradients in one tensor, which a backward pass adds to.
            optimizer.zero_grad()
            sum((x * grad.to(x)).sum() for x, grad in zip(side, grads, strict=True)).backward()
            optimizer.step()
    for each, reference in zip(on_npu, references, strict=True):
        torch.testing.assert_close(each.detach().cpu().double(), reference.detach(), rtol=1e-5, atol=1e-5)


def test_a_decoder_steps_from_one_token_to_the_next_and_clears_the_padding():
    block_size, lengths = 4, torch.tensor([3, 8, 5])
    tokens, positions, slots = torch.tensor([10, 11, 12]), lengths - 1, torch.tensor([0, 0, 7])
    tables = torch.tensor([[4, 9, 2], [7, 1, 3], [5, 6, 8]])
    on_npu = [each.npu() for each in (tokens, torch.tensor([[21], [22]]), positions, lengths, slots, tables)]
    torch_npu.npu_advance_step_flashattn(*on_npu, 3, 2, block_size)
    assert on_npu[0].tolist() == [21, 22, 0]
    assert on_npu[2].tolist() == [3, 8, 0]
    assert on_npu[3].tolist() == [4, 9, 5]
    assert on_npu[4].tolist() == [4 * 4 + 3, 3 * 4 + 0, -1]
