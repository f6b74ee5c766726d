"""Check that all ranks of a vocab-parallel call pass the same rows, options and shard sizes.

Each rank sends a summary of its arguments along with its statistics, so that all ranks detect a mismatch and raise the
same error. If the values cannot be read, or only by synchronizing with a device, the results become nan instead.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol
from zlib import crc32

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._torch_compat.modes import assume_constant_result

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
_EXACT = 2**24  # float32 represents all integers up to it
_FEATURES = 4  # features compared per row
_ROWS = 3  # rows compared
# Bounds the 16-bit rounding errors of the same row, computed in a different order on each rank.
_TOLERANCE = 2.0**-4
_WEIGHTS = ("token_weight", "weight")
_NUMBERS = 3  # compared per weight
_TOLERANCE_OF_WEIGHTS = 2.0**-8  # a weight of 16 bits, rounded once
_OWN_ROWS = "; if every rank has its own rows, as with FSDP2, pass {instead} instead of process_group"
_INSTEAD = {"linear_cross_entropy": "fsdp_module", "linear_kl_div": "the whole head"}


_DESCRIPTIONS: dict[str, tuple[str, Callable[[float], object] | None, str]] = {
    "rows": ("the number of rows of input", int, _OWN_ROWS),
    "features": ("the number of features of input", int, ""),
    "vocab_sizes": ("vocab_sizes", None, ""),
    "reduction": ("reduction", lambda place: REDUCTIONS[int(place)], ""),
    "label_smoothing": ("label_smoothing", lambda value: round(value, 6), ""),
    "lse_square_scale": ("lse_square_scale", lambda value: round(value, 6), ""),
    "softcap": ("softcap", lambda value: round(value, 6) or None, ""),
    "temperature": ("temperature", lambda value: round(value, 6), ""),
    "divergence": ("divergence", None, ""),
    "beta": ("beta", lambda value: round(value, 6), ""),
    "rows_per_chunk": ("the rows per chunk, from chunk_size or max_memory,", int, ""),
    "has_gradients": ("whether a gradient is needed", bool, ""),
    "teacher": ("the teacher", None, _OWN_ROWS),
    "has_probabilities": ("whether target has probabilities", bool, ""),
    "is_differentiated": ("whether input needs a gradient", bool, ""),
    "reduce_input_grad": ("reduce_input_grad", bool, ""),
    "zero_if_all_ignored": ("zero_if_all_ignored", bool, ""),
    "has_token_weight": ("whether token_weight is given", bool, ""),
    "has_weight": ("whether weight is given", bool, ""),
    "token_weight": ("token_weight", None, ""),
    "weight": ("weight", None, ""),
    "target": ("target", None, _OWN_ROWS),
    "input": ("input", None, _OWN_ROWS),
}
_PROBES = 2 * _ROWS * _FEATURES
_ENTRIES = 9  # of linear_weight, compared between ranks


class Call(Protocol):
    """The arguments of a call as numbers, which must be the same on all ranks except for ``excess``, the last field.

    ``excess`` is the number of rows of this rank's head minus its entry of vocab_sizes.
    """

    @property
    def _fields(self) -> tuple[str, ...]: ...

    def __iter__(self) -> Iterator[float]: ...


def size_of(call: Call) -> int:
    """Return the number of elements of a summary."""
    return len(call._fields) + 1 + len(_WEIGHTS) * _NUMBERS + _ENTRIES + _PROBES


@assume_constant_result
def hash_sizes(sizes: tuple[int, ...]) -> int:
    """Return a hash of the shard sizes that float32 represents exactly."""
    return crc32(repr(sizes).encode()) % _EXACT


def summarize(
    call: Call,
    input: Tensor,
    shard: Tensor,
    target: Tensor | None,
    other: Tensor | None,
    dtype: torch.dtype,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the summary of a call that a rank sends, of shape (size_of(call),); it is not differentiable.

    ``shard`` is this rank's part of the head; ``target`` has class indices; ``other`` has floating-point values per
    row, such as probabilities; ``weights`` are those of rows and of classes.
    """
    probes = [_probe(rows, dtype) for rows in (input, other) if rows is not None]
    if other is None:
        probes.append(torch.zeros_like(probes[0]))
    fingerprint = torch.zeros_like(probes[0][:1])
    if target is not None:
        places = torch.arange(target.shape[0], device=target.device)
        fingerprint = ((target.detach() + 2) * (2 * places + 1)).sum().remainder(_EXACT).reshape(1).to(dtype)
    *same, excess = _constants(list(call), dtype, input.device).split((len(call._fields) - 1, 1))
    numbers = [_numbers_of(weight, excess) for weight in weights]
    return torch.cat([*same, fingerprint, excess, *numbers, _entries_of(shard, dtype), *probes])


def _entries_of(shard: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first, middle and last features of the first, middle and last rows, shape (_ENTRIES,)."""
    shard = shard.detach()
    if shard.numel() == 0:
        return shard.new_zeros(_ENTRIES, dtype=dtype)
    rows, features = ((0, size // 2, size - 1) for size in shard.shape)
    return torch.stack([shard[row, feature] for row in rows for feature in features]).to(dtype)


def _numbers_of(weight: Tensor | None, like: Tensor) -> Tensor:
    """Return the mean of a weight, one that depends on the order, and the mean of its absolute values."""
    if weight is None or weight.numel() == 0:
        return like.new_zeros(_NUMBERS)
    values = weight.detach().reshape(-1).to(like.dtype)
    ramp = torch.arange(values.shape[0], dtype=like.dtype, device=like.device) / values.shape[0]
    return torch.stack([values.mean(), (values * ramp).mean(), values.abs().mean()])


def _constants(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    # Pinned, so that the copy is asynchronous.
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "npu").to(device, non_blocking=True)


def _probe(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first features of the first, middle and last row, shape (_ROWS * _FEATURES,)."""
    rows = rows.detach()
    number, features = rows.shape
    if number == 0:
        return rows.new_zeros(_ROWS * _FEATURES, dtype=dtype)
    some = torch.stack([rows[0], rows[number // 2], rows[number - 1]])[:, :_FEATURES].to(dtype)
    return torch.nn.functional.pad(some, (0, max(_FEATURES - features, 0))).reshape(-1)


def compare_summaries(
    function: str, call: Call, summaries: Tensor, sizes: tuple[int, ...], names: Sequence[str] = ("input", "target")
) -> Tensor | None:
    """Compare the summaries of all ranks, of shape (world size, size_of(call)).

    Args:
        function: the name of the public function, for errors.
        call: this rank's call.
        summaries: the results of :func:`summarize` on all ranks.
        sizes: the number of classes of each rank.
        names: the names of the arguments whose rows were summarized.

    Returns:
        ``None`` if the values can be read. Otherwise a factor for the results: 1 if the summaries match, else nan.

    Raises:
        ValueError: The summaries do not match, and the values can be read.
    """
    spread = summaries.amax(0) - summaries.amin(0)
    same = len(call._fields)
    allowed = summaries[:, -_PROBES:].reshape(-1, 2, _PROBES // 2).abs().amax((0, 2)) * _TOLERANCE
    of_weights = slice(same + 1, same + 1 + len(_WEIGHTS) * _NUMBERS)
    entries = summaries[:, of_weights.stop : of_weights.stop + _ENTRIES]
    # Not of a constant head, such as one of zeros.
    has_same_shards = (entries == entries[:1]).all() & (entries.amax() > entries.amin())
    if len(sizes) == 1 or len(set(sizes)) > 1:
        has_same_shards = torch.zeros_like(has_same_shards)
    sizes_of_weights = summaries[:, of_weights].reshape(-1, len(_WEIGHTS), _NUMBERS)[:, :, -1].amax(0)
    spread_of_weights = spread[of_weights].reshape(len(_WEIGHTS), _NUMBERS).amax(1)
    differs = torch.cat(
        [
            spread[:same] != 0,
            summaries[:, same : same + 1].abs().amax(0) != 0,
            spread_of_weights > _TOLERANCE_OF_WEIGHTS * sizes_of_weights,
            (spread[-_PROBES:].reshape(2, -1) > allowed.unsqueeze(1)).any(1),
            has_same_shards.reshape(1),
        ]
    )
    if not values_are_readable(summaries):
        return torch.ones_like(spread[0]).masked_fill(differs.any(), torch.nan)
    if differs.any():
        labels = (*call._fields[:-1], "target", "excess", *_WEIGHTS, *names, "linear_weight")
        _raise_difference(function, labels, summaries.tolist(), differs.tolist(), sizes)
    return None


def _raise_difference(
    function: str, labels: Sequence[str], summaries: list[list[float]], differs: list[bool], sizes: tuple[int, ...]
) -> NoReturn:
    place = differs.index(True)
    name = labels[place]
    if name == "excess":
        rank = next(rank for rank, numbers in enumerate(summaries) if numbers[place] != 0)
        rows = sizes[rank] + int(summaries[rank][place])
        raise ValueError(
            f"{function}: vocab_sizes must have linear_weight's {rows} rows at rank {rank}, but it has"
            f" {sizes[rank]}: vocab_sizes is {sizes}"
        )
    if name == "linear_weight":
        raise ValueError(
            f"{function}: linear_weight must be this rank's shard of the head, but it is the same on every rank of"
            f" process_group, with {sizes[0]} rows; pass head.chunk(world_size)[rank]"
        )
    is_number = place < labels.index("excess")
    raise_mismatch(function, name, [numbers[place] for numbers in summaries] if is_number else ())


def raise_mismatch(function: str, name: str, numbers: Sequence[float] = ()) -> NoReturn:
    """Raise for an argument that differs between ranks; the message has its values if they can be decoded."""
    what, decode, hint = _DESCRIPTIONS[name]
    described = "it is not"
    if decode is not None:
        rank = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        described = f"it is {decode(numbers[0])!r} on rank 0 and {decode(numbers[rank])!r} on rank {rank}"
    hint = hint.format(instead=_INSTEAD[function])
    raise ValueError(f"{function}: {what} must be the same on every rank of process_group, but {described}{hint}")


def check_messages(function: str, kind: dict[str, int], gathered: Any) -> None:
    """Raise if ranks would exchange messages of different sizes.

    Args:
        function: the name of the public function, for errors.
        kind: what determines the number of values per row, and its values on this rank.
        gathered: per rank, the rows of the head, the rows of the input, and the values of ``kind``.
    """
    _, rows, *values = zip(*gathered, strict=True)
    if len(set(rows)) > 1:
        raise_mismatch(function, "rows", rows)
    for (name, own), numbers in zip(kind.items(), values, strict=True):
        if len(set(numbers)) > 1:
            rank = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
            first, other = (type(own)(number) for number in (numbers[0], numbers[rank]))
            raise ValueError(
                f"{function}: {name} must be the same on every rank of process_group, but it is {first} on rank 0 and"
                f" {other} on rank {rank}"
            )
