"""Trains a Llama block with torch_npu's fused operators on the host NPU, and with plain torch on the CPU.

Run it with ``python -m host_npu host-npu/examples/llama_block.py``. It prints both losses of every step.
"""

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor, nn

_TOKENS, _VOCABULARY, _SIZE, _HEADS, _KV_HEADS, _INNER = 24, 64, 32, 4, 2, 48
_HEAD_SIZE = _SIZE // _HEADS


class Fused:
    """The parts of the block by torch_npu's fused operators."""

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        """Returns the RMS norm of the last dimension."""
        return torch_npu.npu_rms_norm(x, weight, 1e-6)[0]

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the heads with rotary position embeddings."""
        return torch_npu.npu_rotary_mul(x, cos, sin)

    @staticmethod
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the causal attention of heads."""
        # Sparse mode 2 is causal, and takes the mask of 2048 x 2048 that CANN compresses it to.
        mask = torch.ones(2048, 2048, dtype=torch.bool, device=query.device).triu(1)
        scale = _HEAD_SIZE**-0.5
        return torch_npu.npu_fusion_attention(
            query, key, value, _HEADS, "BSND", scale=scale, atten_mask=mask, sparse_mode=2
        )[0]

    @staticmethod
    def gate(x: Tensor) -> Tensor:
        """Returns the SwiGlu of the two halves."""
        return torch_npu.npu_swiglu(x, dim=-1)


class Plain:
    """The same parts by torch's operators, 16 bits rounded once as the fused ones do."""

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        """Returns the RMS norm of the last dimension."""
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()).to(x.dtype)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the heads with rotary position embeddings."""
        first, second = x.float().chunk(2, -1)
        return (x.float() * cos.float() + torch.cat([-second, first], -1) * sin.float()).to(x.dtype)

    @staticmethod
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the causal attention of heads."""
        heads = (each.transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)

    @staticmethod
    def gate(x: Tensor) -> Tensor:
        """Returns the SwiGlu of the two halves."""
        gate, value = x.float().chunk(2, -1)
        return (F.silu(gate) * value).to(x.dtype)


class LlamaBlock(nn.Module):
    """An embedding, attention, a gated linear unit and an output head."""

    def __init__(self, parts: type[Fused] | type[Plain]) -> None:
        """Creates the block, with the operators of ``parts``."""
        super().__init__()
        self.parts = parts
        self.embedding = nn.Embedding(_VOCABULARY, _SIZE)
        self.norms = nn.ParameterList(torch.ones(_SIZE) for _ in range(3))
        self.query = nn.Linear(_SIZE, _SIZE, bias=False)
        self.key_value = nn.Linear(_SIZE, 2 * _KV_HEADS * _HEAD_SIZE, bias=False)
        self.out = nn.Linear(_SIZE, _SIZE, bias=False)
        self.up = nn.Linear(_SIZE, 2 * _INNER, bias=False)
        self.down = nn.Linear(_INNER, _SIZE, bias=False)
        self.head = nn.Linear(_SIZE, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of a batch of tokens."""
        x = self.embedding(tokens)
        x = x + self._attention(self.parts.norm(x, self.norms[0]))
        x = x + self.down(self.parts.gate(self.up(self.parts.norm(x, self.norms[1]))))
        return self.head(self.parts.norm(x, self.norms[2]))

    def _attention(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (_HEADS, _HEAD_SIZE))
        key, value = self.key_value(x).unflatten(-1, (2 * _KV_HEADS, _HEAD_SIZE)).chunk(2, 2)
        angles = torch.arange(x.shape[1])[:, None] / 100 ** torch.linspace(0, 1, _HEAD_SIZE // 2)
        angles = torch.cat([angles, angles], -1)[None, :, None]
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        query, key = self.parts.rotate(query, cos, sin), self.parts.rotate(key, cos, sin)
        return self.out(self.parts.attention(query, key, value.contiguous()).flatten(2))


def train(device: str, dtype: torch.dtype, steps: int) -> list[float]:
    """Returns the losses of a training, fused on an NPU and plain on a CPU."""
    torch.manual_seed(0)
    fused = device == "npu"
    model = LlamaBlock(Fused if fused else Plain).to(device)
    optimizer_type = torch_npu.optim.NpuFusedAdamW if fused else torch.optim.AdamW
    optimizer = optimizer_type(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(_VOCABULARY, (2, _TOKENS + 1), generator=generator).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        # NpuFusedAdamW takes no bfloat16, so that the parameters are float32 and the block computes with casts of them.
        weights = {name: each.to(dtype) for name, each in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for step, losses in enumerate(zip(*(train(each, torch.float32, 10) for each in ("npu", "cpu")), strict=True)):
        print(f"step {step}: {losses[0]:.6f} fused on the NPU, {losses[1]:.6f} plain on the CPU")
