"""Whether the processes that share a vocabulary make the same call: the same rows, options, and cut of the vocabulary.

Each process sends a few numbers of its call along with its statistics, so that all see whether they differ, and raise
the same error. Where looking at them would wait for a device, or is not possible, the results become nan instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._torch_compat.modes import assume_constant_result

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
_EXACT = 2**24  # float32 has every whole number up to it
_FEATURES = 4  # of a row that is compared
_ROWS = 3  # that are compared
# Copies of a row may have been computed in another order, in 16 bits; rows of different data differ by more.
_TOLERANCE = 2.0**-4
_OWN_ROWS = "; if every rank has rows of its own, as with FSDP2, give fsdp_module instead of process_group"


class Call(NamedTuple):
    """What every process must say of a call, in numbers; but for ``excess``, the same on all."""

    rows: int
    features: int
    vocab_sizes: int  # a hash
    reduction: int  # place in REDUCTIONS
    label_smoothing: float
    lse_square_scale: float
    softcap: float  # 0 for none
    temperature: float
    has_probabilities: bool
    is_differentiated: bool
    excess: int  # of this rank's rows of the head over those of vocab_sizes


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
_SAME = [*Call._fields[:-1], "target"]  # fields that are compared exactly
_PROBES = 2 * _ROWS * _FEATURES
SIZE = len(_SAME) + 1 + _PROBES


@assume_constant_result
def hash_of(sizes: tuple[int, ...]) -> int:
    """Return a number for a cut of the vocabulary, which float32 can hold."""
    return crc32(repr(sizes).encode()) % _EXACT


def summarize(call: Call, input: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a process sends of its call, shape (SIZE,), without derivatives."""
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
    # Pinned, so that the copy does not wait for the device.
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "npu").to(device, non_blocking=True)


def _probe(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some numbers of the first row, the one in the middle and the last, shape (_ROWS * _FEATURES,)."""
    number, features = rows.shape
    if number == 0:
        return rows.new_zeros(_ROWS * _FEATURES, dtype=dtype)
    some = torch.stack([rows[0], rows[number // 2], rows[number - 1]])[:, :_FEATURES].to(dtype)
    return torch.nn.functional.pad(some, (0, max(_FEATURES - features, 0))).reshape(-1)


def agree(summaries: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
    """Compare the summaries of all processes, shape (processes, SIZE).

    Returns:
        ``None`` if they agree, or a factor for the results: 1, or nan if they do not.

    Raises:
        ValueError: they do not agree, and the values can be read.
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
        raise_different("input" if place == len(_SAME) + 1 else "target")
    raise_different(_SAME[place], [numbers[place] for numbers in summaries])


def raise_different(name: str, numbers: Sequence[float] = ()) -> NoReturn:
    """Raise for what is not the same on all processes, whose numbers are told if they mean something."""
    what, decode, hint = _WORDS[name]
    described = "it is not"
    if decode is not None:
        rank = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        described = f"it is {decode(numbers[0])!r} on rank 0 and {decode(numbers[rank])!r} on rank {rank}"
    raise ValueError(
        f"linear_cross_entropy: {what} must be the same on every rank of process_group, but {described}{hint}"
    )


def check_messages(gathered: Any) -> None:
    """Raise where the numbers of rows, or what is exchanged of each, differ: the messages would not fit each other.

    Args:
        gathered: of each rank the rows of its head, those of its input, and how many numbers of each row it sends.
    """
    _, rows, numbers = zip(*gathered, strict=True)
    if len(set(rows)) > 1:
        raise_different("rows", rows)
    if len(set(numbers)) > 1:
        raise ValueError(
            "linear_cross_entropy: outputs, label_smoothing and dtypes must be the same on every rank of process_group,"
            " but they are not"
        )
