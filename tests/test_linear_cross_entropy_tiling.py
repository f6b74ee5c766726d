"""linear_cross_entropy: its chunk sizes, and the memory that they need."""

import math
from functools import partial

from torch_aclnn_ops.ops._tiling import Sizes, tile_rows

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 7, 100, 5000])
@pytest.mark.parametrize("classes", [1, 50, 200_000])
@pytest.mark.parametrize("features", [64, 1250])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_tiling_covers_all_rows_within_max_memory(dtype, rows, classes, features, copies):
    sizes = Sizes(rows, classes, features, dtype, True)
    for options in ({}, {"chunk_size": 3}, {"max_memory": 2**31}):
        tile = partial(tile_rows, "linear_cross_entropy", sizes, copies=copies, **options)
        tilings = [tile(with_gradient=True, units=units) for units in (False, dtype == torch.bfloat16)]
        for tiling in (*tilings, tile()):
            assert [row for chunk in tiling.chunks() for row in range(chunk.start, chunk.stop)] == list(range(rows))
            assert tiling.bytes_held <= options.get("max_memory", math.inf)


@pytest.mark.parametrize(
    ("features", "options", "rows_per_chunk", "held"),
    [
        (1024, {}, 512, 0),  # 512 rows of float32 logits have the size of the gradient
        (1000, {}, 456, 0),  # 496 in multiples of 8 have room, and five chunks of one size
        (1024, {"chunk_size": 512}, 512, 0),
        (1024, {"chunk_size": 513}, 513, 513),
    ],
)
def test_logits_reuse_the_memory_of_the_heads_gradient(features, options, rows_per_chunk, held):
    rows, classes = 2048 if features == 1024 else 2250, 30_000
    sizes = Sizes(rows, classes, features, torch.bfloat16, True)
    others = rows * classes * 2 + min(2**22 // (features * 4), classes) * features * 4
    tiling = tile_rows("linear_cross_entropy", sizes, **options, with_gradient=True, units=True)
    assert tiling.keeps_gradients
    assert (tiling.rows_per_chunk, tiling.bytes_held) == (rows_per_chunk, others + held * classes * 4)


@pytest.mark.parametrize("rows", [0, 1, 100])
@pytest.mark.parametrize("features", [16, 1024])
@pytest.mark.parametrize("copies", [1, 3])
def test_the_minimum_memory_named_by_the_error_is_accepted_and_less_is_not(rows, features, copies):
    sizes = Sizes(rows, 30_000, features, torch.bfloat16, True)
    tile = partial(tile_rows, "linear_cross_entropy", sizes, copies=copies, with_gradient=True, units=True)
    with pytest.raises(ValueError, match="max_memory must be at least") as refused:
        tile(max_memory=1000)
    least = int(str(refused.value).partition("at least ")[2].partition(" ")[0])
    tiling = tile(max_memory=least)
    assert tiling.bytes_held == least
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        tile(max_memory=least - 1)
