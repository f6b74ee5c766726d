"""Check that all ranks of a vocab-parallel call pass the same rows and options, and different shards.

Each rank sends a summary of its arguments along with its statistics, so that all ranks detect a mismatch and raise the
same error. If the values cannot be read, or only by synchronizing with a device, the results become nan instead.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._torch_compat.private import assume_constant_result, in_dispatch_mode

import torch
from torch import Tensor

_EXACT = 2**24  # float32 represents all integers up to it
_FEATURES = 4  # features compared per row
_PLACES = 3  # rows compared of linear_weight

# A summary consists of groups of this many numbers, padded with zeros.
_GROUP = _PLACES * _FEATURES
# Ranks disagree about a group g, compared with that of rank 0, if a number of |g_0 - s g| is above a factor times the
# largest one of |g_0 - t g|: (s, t, factor).
_SAME = (1.0, -1.0, 0.0)
_ROUNDED = (1.0, -1.0, 2.0**-5)  # the same row in 16 bits, computed in a different order on each rank
_DIFFERENT = (-1.0, 1.0, 2.0**21)

ROWS = "the number of rows of input"
_OF_ROWS = (ROWS, "input", "target")
_INSTEAD = {"linear_cross_entropy": "fsdp_module", "linear_kl_div": "the whole head"}

# The arguments of a call that must be the same on all ranks, by their descriptions in errors. Sizes are hashed.
Agreed = Mapping[str, Any]


class Summary(NamedTuple):
    """What a rank sends about its call, and how to compare it; not differentiable."""

    sent: list[Tensor]  # to be concatenated, which promotes them to the dtype of ``factors``
    signs: Tensor  # s and t of each group, shape (2, 1, groups, 1)
    factors: Tensor  # of each group

    @property
    def size(self) -> int:
        """The number of elements that are sent."""
        return self.factors.shape[0] * _GROUP


@assume_constant_result
def _hash(value: object) -> int:
    return crc32(repr(value).encode()) % _EXACT


def summarize(
    call: Agreed, sizes: Sequence[int], input: Tensor, shard: Tensor, target: Tensor | None, dtype: torch.dtype
) -> Summary:
    """Return the summary of a call that a rank sends.

    The shard of the head must not be the same on all ranks, unless it is constant. ``sizes`` are the ranks' numbers of
    classes.
    """
    of_call = -(-len(call) // _GROUP)
    kinds = [*[_SAME] * of_call, _SAME, _ROUNDED, _DIFFERENT]
    padding = [0.0] * (of_call * _GROUP - len(call))
    columns = [number for column in zip(*kinds, strict=True) for number in column]
    # Different for different values: float32 represents them, or rounds them on all ranks.
    encoded = [_hash(one) if one is None or isinstance(one, (str, tuple)) else one for one in call.values()]
    numbers = [*encoded, *padding, *[0.0] * _GROUP, *columns]
    lengths = of_call * _GROUP, _GROUP, 2 * len(kinds), len(kinds)
    make = _constants if torch.compiler.is_compiling() or in_dispatch_mode() else _constants_cached
    same, zeros, signs, factors = make(tuple(numbers), dtype, input.device).split(lengths)
    # Shards of different sizes are different. Zeros stand for what is not given, so that nothing is launched for it.
    are_comparable = len(sizes) > 1 and len(set(sizes)) == 1
    # The bytes of a sum that depends on all targets and their order.
    of_target = [] if target is None else [target.detach().cumsum(0).sum().reshape(1).view(torch.uint8)]
    rows = input.detach()[:, :_FEATURES]
    of_shard = [_some_of(shard.detach(), dtype)] if are_comparable else []
    groups = of_target, [rows[:1].reshape(-1), rows[-1:].reshape(-1)], of_shard
    padded = [part for group in groups for part in (*group, zeros[sum(one.shape[0] for one in group) :])]
    return Summary([same, *padded], signs.unflatten(0, (2, 1, -1, 1)), factors)


def _some_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some features of evenly spaced rows up to the last one, minus the first: zeros if all are equal."""
    step = max((rows.shape[0] - 1) // (_PLACES - 1), 1)
    features = rows[(rows.shape[0] - 1) % step :: step][:_PLACES, :_FEATURES].to(dtype)  # 16 bits round differences
    return (features - features[:1, :1]).reshape(-1)


def _constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


@lru_cache(64)
def _constants_cached(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # The calls of a training loop have the same options, which nothing writes to.
    with torch.inference_mode(False):  # so that every later call can use them
        return _constants(numbers, dtype, device)


def compare_summaries(
    function: str, call: Agreed, summary: Summary, summaries: Tensor, sizes: Sequence[int]
) -> Tensor | None:
    """Compare the summaries of all ranks, of shape (world size, summary.size).

    Returns:
        ``None`` if the values can be read. Otherwise whether the summaries do not match: all results must be nan then.

    Raises:
        ValueError: The summaries do not match, and the values can be read.
    """
    groups = summaries.detach().unflatten(1, (-1, _GROUP))
    differences = torch.addcmul(groups[:1], groups, summary.signs, value=-1)
    different, bound = torch.linalg.vector_norm(differences, math.inf, (1, 3)).unbind()
    disagree: Tensor = different > bound * summary.factors
    if not values_are_readable(summaries):
        return disagree.any()
    if disagree.any():
        group = disagree.tolist().index(True) - -(-len(call) // _GROUP)
        if group < 0:
            columns = zip(*summaries.tolist(), strict=True)
            name = next(name for name, numbers in zip(call, columns, strict=False) if len(set(numbers)) > 1)
            raise_mismatch(function, name, repr(call[name]))
        if group < 2:
            raise_mismatch(function, ("target", "input")[group], "different")
        raise ValueError(
            f"{function}: linear_weight must be this rank's shard of the head, but it is the same on every rank of"
            f" process_group, with {sizes[0]} rows; pass head.chunk(world_size)[rank]"
        )
    return None


def nan_if(disagree: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of results whose gradients must be nan, too: nan if ranks disagree, else 1."""
    return torch.ones_like(disagree, dtype=dtype).masked_fill(disagree, torch.nan)


def raise_mismatch(function: str, name: str, described: str) -> NoReturn:
    """Raise for an argument that is not the same on all ranks."""
    hint = f"; if every rank has its own rows, as with FSDP2, pass {_INSTEAD[function]} instead of process_group"
    raise ValueError(
        f"{function}: {name} must be the same on every rank of process_group, but on this one it is"
        f" {described}{hint * (name in _OF_ROWS)}"
    )
