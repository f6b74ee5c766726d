"""Trains a mixture of experts with torch_npu's fused operators on the host NPU, and with plain torch on the CPU.

Run it with ``python -m host_npu host-npu/examples/moe_block.py``. It prints both losses of every step.
"""

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor, nn

_TOKENS, _SIZE, _INNER, _EXPERTS, _CHOICES = 32, 16, 24, 4, 2


class GroupedMatmul(torch.autograd.Function):
    """Multiplies groups of rows by the matrix of their expert; torch_npu has no derivative of npu_grouped_matmul."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
        """Returns the products, where expert ``i`` has the rows before ``ends[i]``."""
        ctx.save_for_backward(x, weight)
        ctx.ends = ends
        return _products(x, list(weight), ends)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Returns the gradients of the rows and of the matrices."""
        x, weight = ctx.saved_tensors
        grad_x = _products(grad, [each.t().contiguous() for each in weight], ctx.ends)
        sizes = [end - start for start, end in zip([0, *ctx.ends], ctx.ends, strict=False)]
        pairs = zip(x.split(sizes), grad.split(sizes), strict=True)
        return grad_x, torch.stack([rows.t() @ grads for rows, grads in pairs]), None


def _products(x: Tensor, weights: list[Tensor], ends: list[int]) -> Tensor:
    return torch_npu.npu_grouped_matmul([x], weights, group_list=ends, split_item=3)[0]


def fused_experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Returns the weighted outputs of the experts of each row, by torch_npu's operators."""
    _, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(x @ gate, None, k=_CHOICES)
    # The gating has no derivative, so that the weights of the chosen experts are torch's softmax.
    weights = (x @ gate).softmax(-1).gather(1, experts.long())
    rows, places = torch_npu.npu_moe_token_permute(x, experts)
    ends = experts.flatten().bincount(minlength=_EXPERTS).cumsum(0).tolist()
    hidden = torch_npu.npu_swiglu(GroupedMatmul.apply(rows, up, ends), dim=-1)
    return torch_npu.npu_moe_token_unpermute(GroupedMatmul.apply(hidden, down, ends), places, weights)


def plain_experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Returns the same, every expert computed for every row."""
    scores, experts = (x @ gate).softmax(-1).topk(_CHOICES)
    halves = torch.einsum("ns,esi->nei", x, up).float().chunk(2, -1)
    hidden = (F.silu(halves[0]) * halves[1]).to(x.dtype)
    outputs = torch.einsum("nei,eis->nes", hidden, down)
    chosen = outputs.gather(1, experts[..., None].expand(-1, -1, _SIZE))
    return (chosen.float() * scores[..., None].float()).sum(1).to(x.dtype)


def train(device: str, dtype: torch.dtype, steps: int) -> list[float]:
    """Returns the losses of a training, fused on an NPU and plain on a CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(_SIZE, _EXPERTS), (_EXPERTS, _SIZE, 2 * _INNER), (_EXPERTS, _INNER, _SIZE)]
    parameters = [nn.Parameter((torch.randn(each, generator=generator) * 0.3).to(device)) for each in shapes]
    fused = device == "npu"
    optimizer_type = torch_npu.optim.NpuFusedAdamW if fused else torch.optim.AdamW
    optimizer = optimizer_type(parameters, lr=1e-2)
    x, target = (torch.randn(_TOKENS, _SIZE, generator=generator).to(device) for _ in range(2))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        # NpuFusedAdamW takes no bfloat16, so that the parameters are float32 and the block computes with casts of them.
        gate, up, down = (each.to(dtype) for each in parameters)
        output = (fused_experts if fused else plain_experts)(x.to(dtype), gate, up, down)
        loss = F.mse_loss(output.float(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for step, losses in enumerate(zip(*(train(each, torch.float32, 10) for each in ("npu", "cpu")), strict=True)):
        print(f"step {step}: {losses[0]:.6f} fused on the NPU, {losses[1]:.6f} plain on the CPU")
