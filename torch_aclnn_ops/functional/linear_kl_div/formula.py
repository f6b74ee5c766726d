"""The divergences of rows in differentiable torch calls, for derivatives that the kernel does not have."""

from torch_aclnn_ops._numerics import widen, without_autocast
from torch_aclnn_ops.functional.linear_kl_div.inputs import Inputs
from torch_aclnn_ops.functional.linear_kl_div.teachers import Places, log_probabilities, log_probabilities_with_rest
from torch_aclnn_ops.ops._head.kept_rows import IGNORED

import torch
from torch import Tensor


@without_autocast
def compare_by_formula(inputs: Inputs, in_chunks: bool = True) -> Tensor:
    """Return the loss of every row, 0 for an ignored one, with every derivative.

    It is computed chunk by chunk, but the graph keeps the logits of all rows.
    """
    number = inputs.input.shape[0]
    chunks = inputs.tile(number).chunks() if in_chunks else [slice(None)]
    return torch.cat([_compare(_rows_of(inputs, rows)) for rows in chunks])


def _rows_of(inputs: Inputs, rows: slice) -> Inputs:
    teacher = inputs.teacher
    of_teacher = (None if one is None else one[rows] for one in (teacher.input, teacher.values, teacher.indices))
    input, values, indices = of_teacher
    return inputs._replace(
        input=inputs.input[rows],
        target=None if inputs.target is None else inputs.target[rows],
        teacher=teacher._replace(input=input, values=values, indices=indices),
    )


def _compare(inputs: Inputs) -> Tensor:
    input, teacher = inputs.input, inputs.teacher
    ignored = None if inputs.target is None else inputs.target == IGNORED
    if ignored is not None:  # so that no derivative sees inf or nan
        column = ignored.unsqueeze(1)
        input = input.masked_fill(column, 0)
        of_input = None if teacher.input is None else teacher.input.masked_fill(column, 0)
        # Log-probabilities of 0, because the reverse KL is infinite for probabilities of 0.
        values = None if teacher.values is None else teacher.values.masked_fill(column, 0 if teacher.is_log else 1)
        teacher = teacher._replace(input=of_input, values=values)
    temperature = inputs.options.logits.temperature
    student, measure = (
        _log_softmax(input, inputs.linear_weight, inputs.linear_bias, temperature),
        inputs.options.measure,
    )
    if teacher.indices is not None:
        student = Places.of(teacher, inputs.classes).log_probabilities(student)
        of_teacher = log_probabilities_with_rest(teacher, student, measure.divergence)
    elif teacher.input is not None and teacher.weight is not None:
        of_teacher = _log_softmax(teacher.input, teacher.weight, teacher.bias, temperature)
    else:
        of_teacher = log_probabilities(teacher)
    losses, _ = measure.losses_and_slopes(student, of_teacher.to(student.dtype), inputs.may_be_masked)
    return losses if ignored is None else losses.masked_fill(ignored, 0)


def _log_softmax(input: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = widen(input) @ widen(weight).T
    if bias is not None:
        logits = logits + widen(bias)
    return (logits / temperature).log_softmax(1)
