"""A small decoder-only transformer language model."""

import math
from collections.abc import Callable

from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn as aclnn_nn

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

ROTARY_BASE = 10_000.0
INITIAL_STANDARD_DEVIATION = 0.02


class RotaryPositions(nn.Module):
    """Rotates each pair of query or key channels by an angle proportional to the token's position."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, head_width: int, context: int) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate ``heads``, of shape (batch, heads, positions, head width)."""
        cosine, sine = self.cosine[: heads.shape[-2]], self.sine[: heads.shape[-2]]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class SelfAttention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.positions = RotaryPositions(width // heads, context)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Mix each position with the previous ones."""
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(self.positions(query), self.positions(key), value, is_causal=True)
        output: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return output


class Block(nn.Module):
    """One layer: attention and a feed-forward network, each with a norm before and a residual connection."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, context)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.output = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        hidden = hidden + self.output(gelu(self.expand(self.feed_forward_norm(hidden))))
        return hidden


class Transformer(nn.Module):
    """A pre-norm decoder-only transformer with exchangeable embedding and losses.

    In addition to the next token, it predicts two properties of it, which teach its hidden states common features of
    tokens: the logarithm of its length (a regression), and whether it begins with a letter or a digit (a
    classification).
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        context: int,
        layers: int,
        width: int,
        heads: int,
        embedding_type: type[nn.Embedding] = aclnn_nn.Embedding,
        linear_cross_entropy: Callable[..., torch.Tensor] = F.linear_cross_entropy,
        mse_loss: Callable[..., torch.Tensor] = F.mse_loss,
        binary_cross_entropy: Callable[..., torch.Tensor] = F.binary_cross_entropy,
    ) -> None:
        super().__init__()
        self.context = context
        self.linear_cross_entropy = linear_cross_entropy
        self.mse_loss = mse_loss
        self.binary_cross_entropy = binary_cross_entropy
        self.embedding = embedding_type(vocabulary_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head_weight = nn.Parameter(torch.empty(vocabulary_size, width))
        self.property_head = nn.Linear(width, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, small enough that the first prediction is close to uniform."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # 2 * layers outputs are added up; this keeps the variance of their sum independent of the depth.
                shrink = math.sqrt(2 * len(self.blocks)) if name.endswith("output.weight") else 1.0
                nn.init.normal_(parameter, std=INITIAL_STANDARD_DEVIATION / shrink)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output for ``tokens``, of shape (batch, positions, width)."""
        hidden: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return hidden

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, properties: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean losses of ``targets``, without materializing the logits, and of their ``properties``.

        ``properties``, of shape (batch, positions, 2), holds the logarithm of each target's length, and 1 if it begins
        with a letter or a digit.
        """
        hidden = self.hidden(tokens).flatten(0, 1)
        loss = self.linear_cross_entropy(hidden, self.head_weight, targets.flatten())
        log_length, alphanumeric = self.property_head(hidden).float().unbind(-1)
        true_log_length, truly_alphanumeric = properties.flatten(0, 1).unbind(-1)
        return loss, self.mse_loss(log_length, true_log_length) + self.binary_cross_entropy(
            alphanumeric.sigmoid(), truly_alphanumeric
        )

    def next_token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token for a hidden state of shape (width,)."""
        return hidden @ self.head_weight.T

    @torch.no_grad()
    def continue_text(
        self, tokens: list[int], count: int, *, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> list[int]:
        """Return ``tokens`` and ``count`` more: the most likely ones, or samples if ``temperature`` is above 0."""
        tokens = list(tokens)
        for _ in range(count):
            visible = torch.tensor([tokens[-self.context :]], device=self.head_weight.device)
            logits = self.next_token_logits(self.hidden(visible)[0, -1]).float().cpu()
            if temperature > 0:
                probabilities = torch.softmax(logits / temperature, dim=-1)
                tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
            else:
                tokens.append(int(logits.argmax()))
        return tokens
