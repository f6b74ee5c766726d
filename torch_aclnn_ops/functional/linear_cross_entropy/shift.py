"""Shifted labels, as in a causal language model."""

from torch_aclnn_ops._head_options import check_shift
from torch_aclnn_ops.functional._head.arguments import labels_to_rows, rows_to_labels
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput
from torch_aclnn_ops.functional.linear_cross_entropy.torch_function import TorchArguments

from torch import Tensor


def checked_shift(shift: object, target: object, linear_weight: Tensor) -> int:
    """Accept a number of places that is at most the length of a sequence, where labels can be shifted."""
    places = check_shift("linear_cross_entropy", shift, target if isinstance(target, Tensor) else None)
    if places == 0 or not isinstance(target, Tensor):  # which torch refuses
        return 0
    if target.is_floating_point():
        raise ValueError(
            "linear_cross_entropy: shift must be 0 with probabilities as target, because only class indices can mark"
            f" the rows without a label as ignored, but it is {shift}"
        )
    if linear_weight.dim() > 2:
        raise ValueError(
            "linear_cross_entropy: shift must be 0 with a linear_weight of shape (C, d_1, ..., d_K, H), but it is"
            f" {shift}"
        )
    return places


def shift_targets(
    given: TorchArguments, token_weight: Tensor | None, shift: int
) -> tuple[TorchArguments, Tensor | None]:
    """Align labels and token weights with the rows that predict them; the last rows of a sequence are ignored.

    The input is not copied.
    """
    ignored = -100 if given.ignore_index is None else given.ignore_index
    target, token_weight = labels_to_rows(given.target, token_weight, shift, ignored)
    return given._replace(target=target), token_weight


def shift_results(result: Tensor | LinearCrossEntropyOutput, shift: int) -> Tensor | LinearCrossEntropyOutput:
    """Align the results of rows with their labels; those of ignored rows come first."""
    if isinstance(result, LinearCrossEntropyOutput):
        each = (None if one is None else rows_to_labels(one, shift) for one in result)
        return LinearCrossEntropyOutput._make(each)
    return rows_to_labels(result, shift)
