"""Shifted labels, as in a causal language model."""

from torch_aclnn_ops._head_options import check_shift
from torch_aclnn_ops.functional._head.arguments import labels_to_rows, rows_to_labels
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call

from torch import Tensor


def checked_shift(shift: object, call: Call) -> int:
    """Accept a number of places that is at most the length of a sequence, where labels can be shifted."""
    target: object = call.target
    places = check_shift("linear_cross_entropy", shift, target if isinstance(target, Tensor) else None)
    if places == 0 or not isinstance(target, Tensor):  # which torch refuses
        return 0
    if target.is_floating_point():
        raise ValueError(
            "linear_cross_entropy: shift must be 0 with probabilities as target, because only class indices can mark"
            f" the rows without a label as ignored, but it is {shift}"
        )
    if call.linear_weight.dim() > 2:
        raise ValueError(
            "linear_cross_entropy: shift must be 0 with a linear_weight of shape (C, d_1, ..., d_K, H), but it is"
            f" {shift}"
        )
    return places


def shift_targets(call: Call, shift: int) -> Call:
    """Align labels and token weights with the rows that predict them; the last rows of a sequence are ignored.

    The input is not copied.
    """
    target, token_weight = labels_to_rows(call.target, call.token_weight, shift, call.ignored_class())
    return call._replace(target=target, token_weight=token_weight)


def shift_results(result: Tensor | LinearCrossEntropyOutput, shift: int) -> Tensor | LinearCrossEntropyOutput:
    """Align the results of rows with their labels; those of ignored rows come first."""
    if isinstance(result, LinearCrossEntropyOutput):
        each = (None if one is None else rows_to_labels(one, shift) for one in result)
        return LinearCrossEntropyOutput._make(each)
    return rows_to_labels(result, shift)
