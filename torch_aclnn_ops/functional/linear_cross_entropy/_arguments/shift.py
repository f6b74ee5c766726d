"""Shifted labels, as in a causal language model."""

from numbers import Integral

from torch_aclnn_ops.functional.linear_cross_entropy._arguments.torch_function import TorchArguments
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput

import torch
from torch import Tensor


def check_shift(shift: object, target: object, linear_weight: Tensor) -> int:
    """Check that ``shift`` is less than the sequence length, and return it as an int."""
    if not isinstance(shift, (bool, Integral)):
        raise TypeError(f"linear_cross_entropy: shift must be a bool or an int, but it is {shift!r}")
    places = int(shift)
    if places == 0 or not isinstance(target, Tensor):  # for which torch raises
        return 0
    if target.is_floating_point():
        raise ValueError("linear_cross_entropy: shift must be 0 with probabilities as target, which cannot be ignored")
    if linear_weight.dim() > 2:
        raise ValueError(
            "linear_cross_entropy: shift must be 0 with a linear_weight of shape (C, d_1, ..., d_K, H), but it is"
            f" {shift}"
        )
    length = target.shape[-1] if target.dim() > 0 else 1
    if not 0 <= places < length:
        raise ValueError(
            f"linear_cross_entropy: shift must be at least 0 and less than the {length} labels of a sequence, the last"
            f" dimension of target, but it is {shift}"
        )
    return places


def shift_targets(
    given: TorchArguments, token_weight: Tensor | None, shift: int
) -> tuple[TorchArguments, Tensor | None]:
    """Align labels and token weights with the rows that predict them; the last rows of a sequence are ignored.

    The input is not copied.
    """
    ignored = -100 if given.ignore_index is None else given.ignore_index
    target = torch.nn.functional.pad(given.target[..., shift:].long(), (0, shift), value=ignored)
    if isinstance(token_weight, Tensor):
        token_weight = token_weight.roll(-shift, -1)
    return given._replace(target=target), token_weight


def shift_results(result: Tensor | LinearCrossEntropyOutput, shift: int) -> Tensor | LinearCrossEntropyOutput:
    """Align the results of rows with their labels; those of ignored rows come first."""
    if isinstance(result, LinearCrossEntropyOutput):
        return LinearCrossEntropyOutput._make(None if each is None else _roll(each, shift) for each in result)
    return _roll(result, shift)


def _roll(result: Tensor, shift: int) -> Tensor:
    return result.roll(shift, -1) if result.dim() > 0 else result
