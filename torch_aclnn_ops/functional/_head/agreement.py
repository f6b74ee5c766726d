"""Check that all ranks of a vocab-parallel call pass the same rows, options and shard sizes.

Each rank sends a summary of its arguments along with its statistics, so that all ranks detect a mismatch and raise the
same error. If the values cannot be read, or only by synchronizing with a device, the results become nan instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from zlib import crc32

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._torch_compat.modes import assume_constant_result

import torch
from torch import Tensor

_EXACT = 2**24  # float32 represents all integers up to it
_FEATURES = 4  # features compared per row
_ROWS = 3  # rows compared
# Bounds the 16-bit rounding errors of the same row, computed in a different order on each rank.
_TOLERANCE = 2.0**-4
_WEIGHTS = ("token_weight", "weight")
_NUMBERS = 3  # compared per weight
_TOLERANCE_OF_WEIGHTS = 2.0**-8  # a weight of 16 bits, rounded once
_PROBES = 2 * _ROWS * _FEATURES
_ENTRIES = 9  # of linear_weight, compared between ranks

ROWS = "the number of rows of input"
_WORDS = ("none", "mean", "sum", "forward_kl", "reverse_kl", "jensen_shannon")
_OF_ROWS = (ROWS, "input", "target", "teacher")
_INSTEAD = {"linear_cross_entropy": "fsdp_module", "linear_kl_div": "the whole head"}

# The arguments of a call that must be the same on all ranks, by their descriptions in errors. Sizes are hashed.
Call = Mapping[str, Any]


def size_of(call: Call) -> int:
    """Return the number of elements of a summary."""
    return len(call) + 2 + len(_WEIGHTS) * _NUMBERS + _ENTRIES + _PROBES


def _encode(value: Any) -> Any:
    """Return a number that float32 represents, and that is different for different values."""
    if isinstance(value, str):
        return _WORDS.index(value)
    if isinstance(value, tuple):
        return _hash(value)
    return 0.0 if value is None else value


def _decode(own: Any, name: str, number: float) -> object:
    if isinstance(own, str):
        return _WORDS[int(number)]
    if name == "softcap":
        return round(number, 6) or None
    return round(number, 6) if isinstance(own, float) else type(own)(number)


@assume_constant_result
def _hash(sizes: tuple[int, ...]) -> int:
    return crc32(repr(sizes).encode()) % _EXACT


def summarize(
    call: Call,
    excess: int,
    input: Tensor,
    shard: Tensor,
    target: Tensor | None,
    other: Tensor | None,
    dtype: torch.dtype,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the summary of a call that a rank sends, of shape (size_of(call),); it is not differentiable.

    Args:
        call: What must be the same on all ranks.
        excess: The number of rows of this rank's head minus its entry of vocab_sizes.
        input: The rows.
        shard: This rank's part of the head.
        target: Class indices of the rows.
        other: Floating-point values of the rows, such as probabilities.
        dtype: The dtype of the summary.
        weights: Weights of rows and of classes.
    """
    # The zeros stand for what is not given, so that nothing is launched for it.
    values = [*map(_encode, call.values()), excess, *[0.0] * _PROBES]
    same, surplus, zeros = _constants(values, dtype, input.device).split((len(call), 1, _PROBES))
    fingerprint = zeros[:1]
    if target is not None:
        odd = torch.arange(1, 2 * target.shape[0] + 1, 2, device=target.device)
        fingerprint = (target.detach() * odd).sum().remainder(_EXACT).reshape(1).to(dtype)
    numbers = [_numbers_of(weight, zeros) for weight in weights]
    probes = [_probe(rows, zeros) for rows in (input, other)]
    return torch.cat([same, fingerprint, surplus, *numbers, _entries_of(shard, dtype), *probes])


def _entries_of(shard: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first, middle and last features of the first, middle and last rows, shape (_ENTRIES,)."""
    shard = shard.detach()
    if shard.numel() == 0:
        return shard.new_zeros(_ENTRIES, dtype=dtype)
    rows, features = ((0, size // 2, size - 1) for size in shard.shape)
    return torch.stack([shard[row, feature] for row in rows for feature in features]).to(dtype)


def _numbers_of(weight: Tensor | None, zeros: Tensor) -> Tensor:
    """Return the mean of a weight, one that depends on the order, and the mean of its absolute values."""
    if weight is None or weight.numel() == 0:
        return zeros[:_NUMBERS]
    values = weight.detach().reshape(-1).to(zeros.dtype)
    ramp = torch.arange(values.shape[0], dtype=zeros.dtype, device=zeros.device) / values.shape[0]
    return torch.stack([values.mean(), (values * ramp).mean(), values.abs().mean()])


def _constants(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    # Pinned, so that the copy is asynchronous.
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "npu").to(device, non_blocking=True)


def _probe(rows: Tensor | None, zeros: Tensor) -> Tensor:
    """Return the first features of the first, middle and last row, shape (_ROWS * _FEATURES,)."""
    if rows is None or rows.shape[0] == 0:
        return zeros[: _ROWS * _FEATURES]
    rows = rows.detach()[:, :_FEATURES]
    number, features = rows.shape
    some = torch.stack([rows[0], rows[number // 2], rows[number - 1]]).to(zeros.dtype)
    if features < _FEATURES:
        some = torch.nn.functional.pad(some, (0, _FEATURES - features))
    return some.reshape(-1)


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
    same = len(call) + 1  # with the fingerprint of the targets
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
        labels = (*call, "target", "excess", *_WEIGHTS, *names, "linear_weight")
        _raise_difference(function, call, labels, summaries.tolist(), differs.tolist(), sizes)
    return None


def _raise_difference(
    function: str,
    call: Call,
    labels: Sequence[str],
    summaries: list[list[float]],
    differs: list[bool],
    sizes: tuple[int, ...],
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
    own = call[name] if place < len(call) else None
    has_values = place < len(call) and not isinstance(own, tuple)
    _raise_mismatch(function, name, [_decode(own, name, of_rank[place]) for of_rank in summaries] if has_values else [])


def _raise_mismatch(function: str, name: str, values: Sequence[object]) -> NoReturn:
    described = "it is not"
    if values:
        rank = next(rank for rank, value in enumerate(values) if value != values[0])
        described = f"it is {values[0]!r} on rank 0 and {values[rank]!r} on rank {rank}"
    if name in _OF_ROWS:
        described += (
            f"; if every rank has its own rows, as with FSDP2, pass {_INSTEAD[function]} instead of process_group"
        )
    raise ValueError(f"{function}: {name} must be the same on every rank of process_group, but {described}")


def check_messages(function: str, kind: dict[str, int], gathered: Any) -> None:
    """Raise if ranks would exchange messages of different sizes.

    Args:
        function: the name of the public function, for errors.
        kind: what determines the number of values per row, and its values on this rank.
        gathered: per rank, the rows of the head, the rows of the input, and the values of ``kind``.
    """
    _, *columns = zip(*gathered, strict=True)
    for (name, own), numbers in zip({ROWS: 0, **kind}.items(), columns, strict=True):
        if len(set(numbers)) > 1:
            _raise_mismatch(function, name, [type(own)(number) for number in numbers])
