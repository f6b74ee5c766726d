"""Sizes shared by the tests of ATB, and its attention in float64."""

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
HEADS, SIZE, BLOCK = 2, 16, 4
SCALE = 0.3


def attention(queries: Tensor, keys: Tensor, values: Tensor, is_kept: Tensor | None = None) -> Tensor:
    """Return the attention of one sequence, (tokens, heads, size)."""
    repeats = queries.size(1) // keys.size(1)
    transposed = [
        x.double().transpose(0, 1) for x in (queries, *(y.repeat_interleave(repeats, 1) for y in (keys, values)))
    ]
    attended = torch.nn.functional.scaled_dot_product_attention(*transposed, attn_mask=is_kept, scale=SCALE)
    return attended.transpose(0, 1)


def causal(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
