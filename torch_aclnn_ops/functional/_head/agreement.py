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
_FEATURES = 4  # features compared per row
_PLACES = 3  # rows compared of linear_weight
_WEIGHTS = ("token_weight", "weight")
# Bounds the 16-bit rounding errors of the same row, computed in a different order on each rank.
_TOLERANCE = 2.0**-4
_TOLERANCE_OF_WEIGHTS = 2.0**-8  # a weight of 16 bits, rounded once
_LEAST = 2.0**-20  # of numbers of linear_weight, which is another if they differ by more

# A summary consists of groups of this many numbers, padded with zeros.
_GROUP = _PLACES * _FEATURES
# Ranks disagree about a group g, compared with that of rank 0, if a number of |g_0 - s g| is above a factor times the
# largest one of |g_0 - t g|: (s, t, factor).
_SAME = (1.0, -1.0, 0.0)
_ZERO = (-1.0, 1.0, 0.0)
_DIFFERENT = (-1.0, 1.0, 2 / _LEAST)

ROWS = "the number of rows of input"
_WORDS = ("none", "mean", "sum", "forward_kl", "reverse_kl", "jensen_shannon")
_OF_ROWS = (ROWS, "input", "target", "teacher")
_INSTEAD = {"linear_cross_entropy": "fsdp_module", "linear_kl_div": "the whole head"}

# The arguments of a call that must be the same on all ranks, by their descriptions in errors. Sizes are hashed.
Agreed = Mapping[str, Any]


class Summary(NamedTuple):
    """What a rank sends about its call, and how to compare it; not differentiable."""

    sent: list[Tensor]  # to be concatenated
    signs: Tensor  # s and t of each group, shape (2, 1, groups, 1)
    factors: Tensor  # of each group

    @property
    def size(self) -> int:
        """The number of elements that are sent."""
        return self.factors.shape[0] * _GROUP


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
    kinds = [
        _ZERO,  # excess
        *[_SAME] * of_call,
        _SAME,  # target
        *[_rounded(_TOLERANCE_OF_WEIGHTS)] * len(_WEIGHTS),
        *[_rounded(_TOLERANCE)] * 2,
        _DIFFERENT,  # shards of the head, if they could be the same
    ]
    # Shards of different sizes are different.
    are_comparable = len(sizes) > 1 and len(set(sizes)) == 1 and shard.shape[0] > 0
    of_input, of_other = _ends(input), None if other is None else _ends(other)
    of_head = shard.detach()[_places(shard.shape[0]), :_FEATURES] if are_comparable else None
    padding = [0.0] * (of_call * _GROUP - len(call))
    values = [excess, *[0.0] * (_GROUP - 1), *map(_encode, call.values()), *padding, *[0.0] * _GROUP]
    columns = [number for column in zip(*kinds, strict=True) for number in column]
    weight_of_origin = [0.0] * len(of_input) + [-1.0] * (0 if of_head is None else len(of_head))
    numbers = _constants([*values, *columns, *weight_of_origin], dtype, input.device)
    # The zeros stand for what is not given, so that nothing is launched for it.
    lengths = ((of_call + 1) * _GROUP, _GROUP, 2 * len(kinds), len(kinds), len(weight_of_origin))
    same, zeros, signs, factors, weights_of_origin = numbers.split(lengths)
    if of_head is not None:
        # Minus one entry of the head, so that a constant head is zeros, in one launch for both.
        origin = of_head[:1, :1]
        both = torch.addcmul(torch.cat([of_input, of_head]), weights_of_origin.unsqueeze(1), origin)
        of_input, of_head = both.split((len(of_input), len(of_head)))
    groups = (
        None if target is None else _fingerprint(target, dtype),
        *(None if weight is None else _numbers_of(weight, dtype) for weight in weights),
        *(None if rows is None else rows.to(dtype).reshape(-1) for rows in (of_input, of_other, of_head)),
    )
    padded = [zeros] * (2 * len(groups))
    padded[::2] = [zeros[:0] if group is None else group for group in groups]
    padded[1::2] = [zeros[group.shape[0] :] for group in padded[::2]]
    return Summary([same, *padded], signs.unflatten(0, (2, 1, -1, 1)), factors)


def _rounded(tolerance: float) -> tuple[float, float, float]:
    return (1.0, -1.0, tolerance / 2)  # of the sum of two numbers


def _fingerprint(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a sum that depends on all targets and their order, shape (8,)."""
    return target.detach().cumsum(0).sum().reshape(1).view(torch.uint8).to(dtype)


def _numbers_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of a weight, one that depends on the order, and the mean of its absolute values."""
    values = weight.detach().reshape(-1).to(dtype)
    number = values.shape[0]
    if number == 0:
        return values
    return torch.stack([values, values.cumsum(0) / number, values.abs()]).mean(1)


def _ends(rows: Tensor) -> Tensor:
    """Return the first features of the first and last row, as a view."""
    return rows.detach()[:: max(rows.shape[0] - 1, 1), :_FEATURES]


def _places(size: int) -> slice:
    """Return places up to the last row, at the same distance, so that they are a view."""
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
        ``None`` if the values can be read. Otherwise whether the summaries do not match: all results must be nan then.

    Raises:
        ValueError: The summaries do not match, and the values can be read.
    """
    groups = summaries.detach().unflatten(1, (-1, _GROUP))
    different, bound = torch.addcmul(groups[:1], groups, summary.signs, value=-1).abs_().amax((1, 3)).unbind()
    disagree = different > bound * summary.factors
    if not values_are_readable(summaries):
        return disagree.any()
    if disagree.any():
        group = disagree.tolist().index(True)
        of_call = -(-len(call) // _GROUP)
        if 0 < group <= of_call:
            _raise_difference_of_call(function, call, summaries[:, _GROUP:].tolist())
        name = "excess" if group == 0 else ("target", *_WEIGHTS, *names, "linear_weight")[group - of_call - 1]
        _raise_difference(function, name, summaries[:, group * _GROUP].tolist(), sizes)
    return None


def nan_if(disagree: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of results whose gradients must be nan, too: nan if ranks disagree, else 1."""
    return torch.ones_like(disagree, dtype=dtype).masked_fill(disagree, torch.nan)


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


def check_messages(function: str, messages: dict[str, int], gathered: Any) -> None:
    """Raise if ranks would exchange messages of different sizes.

    Args:
        function: the name of the public function, for errors.
        messages: what determines the sizes of messages, and its values on this rank.
        gathered: per rank, the rows of the head and the values of ``messages``.
    """
    _, *columns = zip(*gathered, strict=True)
    for (name, own), numbers in zip(messages.items(), columns, strict=True):
        if len(set(numbers)) > 1:
            _raise_mismatch(function, name, [type(own)(number) for number in numbers])
