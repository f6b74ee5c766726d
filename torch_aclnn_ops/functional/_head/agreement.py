"""Check that all ranks of a vocab-parallel call pass the same rows, options and shard sizes.

Each rank sends a summary of its arguments along with its statistics, so that all ranks detect a mismatch and raise the
same error. If the values cannot be read, or only by synchronizing with a device, the results become nan instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._torch_compat.modes import assume_constant_result

import torch
from torch import Tensor

_EXACT = 2**24  # float32 represents all integers up to it
_PRIME = _EXACT - 3  # so that no single target can change without its remainder
_FEATURES = 4  # features compared per row
_PLACES = 3  # rows compared, and rows and features of linear_weight
_WEIGHTS = ("token_weight", "weight")
# Bounds the 16-bit rounding errors of the same row, computed in a different order on each rank.
_TOLERANCE = 2.0**-4
_TOLERANCE_OF_WEIGHTS = 2.0**-8  # a weight of 16 bits, rounded once
_LEAST = 2.0**-20  # of numbers of linear_weight, which is another if they differ by more

# A summary consists of groups of this many numbers, padded with zeros.
_GROUP = _PLACES * _FEATURES

ROWS = "the number of rows of input"
_WORDS = ("none", "mean", "sum", "forward_kl", "reverse_kl", "jensen_shannon")
_OF_ROWS = (ROWS, "input", "target", "teacher")
_INSTEAD = {"linear_cross_entropy": "fsdp_module", "linear_kl_div": "the whole head"}

# The arguments of a call that must be the same on all ranks, by their descriptions in errors. Sizes are hashed.
Agreed = Mapping[str, Any]


class Summary(NamedTuple):
    """What a rank sends about its call, and how to compare it; not differentiable."""

    sent: list[Tensor]  # to be concatenated
    factors: Tensor  # of each group's spread and largest number; the sum is above 0 if ranks do not agree
    verdicts: Tensor  # nan and 1

    @property
    def size(self) -> int:
        """The number of elements that are sent."""
        return self.factors.shape[1] * _GROUP


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
    call: Agreed,
    shards: tuple[int, Sequence[int]],
    input: Tensor,
    shard: Tensor,
    target: Tensor | None,
    other: Tensor | None,
    dtype: torch.dtype,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Summary:
    """Return the summary of a call that a rank sends.

    Args:
        call: What must be the same on all ranks.
        shards: The number of rows of this rank's head minus its entry of vocab_sizes, and vocab_sizes.
        input: The rows.
        shard: This rank's part of the head.
        target: Class indices of the rows.
        other: Floating-point values of the rows, such as probabilities.
        dtype: The dtype of the summary.
        weights: Weights of rows and of classes.
    """
    excess, sizes = shards
    of_call = -(-len(call) // _GROUP)
    # Of the spread over the ranks, and of the largest number. Shards of the head must differ, not agree.
    are_comparable = len(sizes) > 1 and len(set(sizes)) == 1
    factors = [
        *[(1.0, 0.0)] * of_call,
        (0.0, 1.0),  # excess
        (1.0, 0.0),  # target
        *[(1.0, -_TOLERANCE_OF_WEIGHTS)] * len(_WEIGHTS),
        *[(1.0, -_TOLERANCE)] * 2,
        (-1.0, _LEAST),
    ]
    padding = [0.0] * (of_call * _GROUP - len(call))
    values = [*map(_encode, call.values()), *padding, excess, *[0.0] * (2 * _GROUP - 1)]
    columns = [factor for column in zip(*factors, strict=True) for factor in column]
    numbers = _constants([*values, *columns, torch.nan, 1.0], dtype, input.device)
    # The zeros stand for what is not given, so that nothing is launched for it.
    same, zeros, columns, verdicts = numbers.split(((of_call + 1) * _GROUP, _GROUP, 2 * len(factors), 2))
    groups = (
        None if target is None else _fingerprint(target, dtype),
        *(None if weight is None else _numbers_of(weight, dtype) for weight in weights),
        *(None if rows is None else _probe(rows, dtype) for rows in (input, other)),
        _entries_of(shard, dtype) if are_comparable else None,
    )
    padded = [zeros] * (2 * len(groups))
    padded[::2] = [zeros[:0] if group is None else group for group in groups]
    padded[1::2] = [zeros[group.shape[0] :] for group in padded[::2]]
    return Summary([same, *padded], columns.unflatten(0, (2, len(factors))), verdicts)


def _fingerprint(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a number that depends on all targets and their order, shape (1,)."""
    return target.detach().cumsum(0).sum().remainder(_PRIME).reshape(1).to(dtype)


def _numbers_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of a weight, one that depends on the order, and the mean of its absolute values."""
    values = weight.detach().reshape(-1).to(dtype)
    number = values.shape[0]
    if number == 0:
        return values
    return torch.stack([values, values.cumsum(0) / number, values.abs()]).mean(1)


def _probe(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first features of the first, middle and last row."""
    number = rows.shape[0]
    if number == 0:
        return rows.new_zeros(0, dtype=dtype)
    rows = rows.detach()[:, :_FEATURES]
    return torch.stack([rows[0], rows[number // 2], rows[number - 1]]).reshape(-1).to(dtype)


def _entries_of(shard: Tensor, dtype: torch.dtype) -> Tensor:
    """Return entries of first, middle and last rows and features, minus one of them: 0 for a constant head."""
    entries = shard.detach()[_places(shard.shape[0]), _places(shard.shape[1])]
    return (entries - entries[:1, :1]).reshape(-1).to(dtype)


def _places(size: int) -> slice:
    """Return places of a dimension up to the last one, at the same distance, so that they are a view."""
    if size < _PLACES:
        return slice(None)
    step = (size - 1) // (_PLACES - 1)
    return slice(size - 1 - (_PLACES - 1) * step, None, step)


def _constants(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    # Pinned, so that the copy is asynchronous.
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "npu").to(device, non_blocking=True)


def compare_summaries(
    function: str,
    call: Agreed,
    summary: Summary,
    summaries: Tensor,
    sizes: tuple[int, ...],
    names: Sequence[str] = ("input", "target"),
) -> Tensor | None:
    """Compare the summaries of all ranks, of shape (world size, summary.size).

    Args:
        function: the name of the public function, for errors.
        call: this rank's call.
        summary: this rank's summary.
        summaries: those of all ranks.
        sizes: the number of classes of each rank.
        names: the names of the arguments whose rows were summarized.

    Returns:
        ``None`` if the values can be read. Otherwise a factor for the results: 1 if the summaries match, else nan.

    Raises:
        ValueError: The summaries do not match, and the values can be read.
    """
    groups = summaries.detach().unflatten(1, (-1, _GROUP))
    largest = torch.stack([groups - groups[:1], groups]).abs().amax((1, 3))
    disagree = (largest * summary.factors).sum(0) > 0
    if not values_are_readable(summaries):
        different, equal = summary.verdicts.unbind()
        return different.where(disagree.any(), equal)
    if disagree.any():
        group = disagree.tolist().index(True)
        of_call = -(-len(call) // _GROUP)
        if group < of_call:
            _raise_difference_of_call(function, call, summaries.tolist())
        name = ("excess", "target", *_WEIGHTS, *names, "linear_weight")[group - of_call]
        _raise_difference(function, name, summaries[:, group * _GROUP].tolist(), sizes)
    return None


def _raise_difference_of_call(function: str, call: Agreed, summaries: list[list[float]]) -> NoReturn:
    columns = zip(*summaries, strict=True)
    name, numbers = next((name, column) for name, column in zip(call, columns, strict=False) if len(set(column)) > 1)
    own = call[name]
    has_values = not isinstance(own, tuple)
    _raise_mismatch(function, name, [_decode(own, name, number) for number in numbers] if has_values else [])


def _raise_difference(function: str, name: str, numbers: list[float], sizes: tuple[int, ...]) -> NoReturn:
    """Raise for what is no part of the call's description; ``numbers`` are the first ones of all ranks' groups."""
    if name == "excess":
        rank = next(rank for rank, number in enumerate(numbers) if number != 0)
        raise ValueError(
            f"{function}: vocab_sizes must have linear_weight's {sizes[rank] + int(numbers[rank])} rows at rank {rank},"
            f" but it has {sizes[rank]}: vocab_sizes is {sizes}"
        )
    if name == "linear_weight":
        raise ValueError(
            f"{function}: linear_weight must be this rank's shard of the head, but it is the same on every rank of"
            f" process_group, with {sizes[0]} rows; pass head.chunk(world_size)[rank]"
        )
    _raise_mismatch(function, name, [])


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
