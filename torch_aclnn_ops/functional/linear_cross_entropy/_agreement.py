"""Check that all ranks of a vocab-parallel call pass the same rows, options and shard sizes.

Each rank sends a summary of its arguments along with its statistics, so that all ranks detect a mismatch and raise the
same error. If the values cannot be read, or only by synchronizing with a device, the results become nan instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._torch_compat.modes import assume_constant_result

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
_EXACT = 2**24  # float32 represents all integers up to it
_FEATURES = 4  # compared per row
_ROWS = 3  # compared
# The same row may have been computed in a different order, in 16 bits; different rows differ by more.
_TOLERANCE = 2.0**-4
_OWN_ROWS = "; if every rank has its own rows, as with FSDP2, pass fsdp_module instead of process_group"


class Call(NamedTuple):
    """The arguments of a call as numbers, which must be the same on all ranks, except for ``excess``."""

    rows: int
    features: int
    vocab_sizes: int  # a hash
    reduction: int  # index in REDUCTIONS
    label_smoothing: float
    lse_square_scale: float
    softcap: float  # 0 for none
    temperature: float
    has_probabilities: bool
    is_differentiated: bool
    excess: int  # this rank's head rows minus its entry of vocab_sizes; must be 0


_WORDS: dict[str, tuple[str, Callable[[float], object] | None, str]] = {
    "rows": ("the number of rows of input", int, _OWN_ROWS),
    "features": ("the number of features of input", int, ""),
    "vocab_sizes": ("vocab_sizes", None, ""),
    "reduction": ("reduction", lambda place: REDUCTIONS[int(place)], ""),
    "label_smoothing": ("label_smoothing", lambda value: round(value, 6), ""),
    "lse_square_scale": ("lse_square_scale", lambda value: round(value, 6), ""),
    "softcap": ("softcap", lambda value: round(value, 6) or None, ""),
    "temperature": ("temperature", lambda value: round(value, 6), ""),
    "has_probabilities": ("whether target has probabilities", bool, ""),
    "is_differentiated": ("whether input requires grad", bool, ""),
    "target": ("target", None, _OWN_ROWS),
    "input": ("input", None, _OWN_ROWS),
}
_SAME = [*Call._fields[:-1], "target"]  # fields compared exactly
_PROBES = 2 * _ROWS * _FEATURES
SIZE = len(_SAME) + 1 + _PROBES


@assume_constant_result
def hash_sizes(sizes: tuple[int, ...]) -> int:
    """Return a hash of the shard sizes that float32 represents exactly."""
    return crc32(repr(sizes).encode()) % _EXACT


def summarize(call: Call, input: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the summary that a rank sends of its call, shape (SIZE,), detached."""
    input, target = input.detach(), target.detach()
    if target.is_floating_point():
        fingerprint, probes = input.new_zeros(1, dtype=dtype), [_probe(input, dtype), _probe(target, dtype)]
    else:
        places = torch.arange(target.shape[0], device=target.device)
        fingerprint = ((target + 2) * (2 * places + 1)).sum().remainder(_EXACT).reshape(1).to(dtype)
        probes = [_probe(input, dtype), input.new_zeros(_PROBES // 2, dtype=dtype)]
    *same, excess = _constants(call, dtype, input.device).split((len(call) - 1, 1))
    return torch.cat([*same, fingerprint, excess, *probes])


def _constants(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    # Pinned, so that the copy is asynchronous.
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "npu").to(device, non_blocking=True)


def _probe(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first features of the first, middle and last row, shape (_ROWS * _FEATURES,)."""
    number, features = rows.shape
    if number == 0:
        return rows.new_zeros(_ROWS * _FEATURES, dtype=dtype)
    some = torch.stack([rows[0], rows[number // 2], rows[number - 1]])[:, :_FEATURES].to(dtype)
    return torch.nn.functional.pad(some, (0, max(_FEATURES - features, 0))).reshape(-1)


def compare_summaries(summaries: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
    """Compare the summaries of all ranks, shape (ranks, SIZE).

    Returns:
        ``None`` if the values can be read. Otherwise a factor for the results: 1 if they match, else nan.

    Raises:
        ValueError: The summaries do not match, and the values can be read.
    """
    spread = summaries.amax(0) - summaries.amin(0)
    same, excess, probes = (len(_SAME), 1, _PROBES)
    allowed = summaries[:, -probes:].reshape(-1, 2, probes // 2).abs().amax((0, 2)) * _TOLERANCE
    differs = torch.cat(
        [
            spread[:same] != 0,
            summaries[:, same : same + excess].abs().amax(0) != 0,
            (spread[-probes:].reshape(2, -1) > allowed.unsqueeze(1)).any(1),
        ]
    )
    if not values_are_readable(summaries):
        return torch.ones_like(spread[0]).masked_fill(differs.any(), torch.nan)
    if differs.any():
        _raise_difference(summaries.tolist(), differs.tolist(), sizes)
    return None


def _raise_difference(summaries: list[list[float]], differs: list[bool], sizes: tuple[int, ...]) -> NoReturn:
    place = differs.index(True)
    if place == len(_SAME):
        rank = next(rank for rank, numbers in enumerate(summaries) if numbers[place] != 0)
        rows = sizes[rank] + int(summaries[rank][place])
        raise ValueError(
            f"linear_cross_entropy: vocab_sizes must have linear_weight's {rows} rows at rank {rank}, but it has"
            f" {sizes[rank]}: vocab_sizes is {sizes}"
        )
    if place > len(_SAME):
        raise_mismatch("input" if place == len(_SAME) + 1 else "target")
    raise_mismatch(_SAME[place], [numbers[place] for numbers in summaries])


def raise_mismatch(name: str, numbers: Sequence[float] = ()) -> NoReturn:
    """Raise ``ValueError`` for an argument that differs between ranks, showing its values if they are meaningful."""
    what, decode, hint = _WORDS[name]
    described = "it is not"
    if decode is not None:
        rank = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        described = f"it is {decode(numbers[0])!r} on rank 0 and {decode(numbers[rank])!r} on rank {rank}"
    raise ValueError(
        f"linear_cross_entropy: {what} must be the same on every rank of process_group, but {described}{hint}"
    )


def check_messages(gathered: Any) -> None:
    """Raise if the ranks would send messages of different sizes.

    Args:
        gathered: For each rank: rows of its head, rows of its input, and a number identifying what it sends per row.
    """
    _, rows, numbers = zip(*gathered, strict=True)
    if len(set(rows)) > 1:
        raise_mismatch("rows", rows)
    if len(set(numbers)) > 1:
        raise ValueError(
            "linear_cross_entropy: outputs, label_smoothing and dtypes must be the same on every rank of process_group,"
            " but they are not"
        )
