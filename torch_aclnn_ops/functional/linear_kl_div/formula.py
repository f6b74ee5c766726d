"""The divergences of rows in differentiable torch calls, for derivatives that the kernel does not have."""

from torch_aclnn_ops._numerics import widen, without_autocast
from torch_aclnn_ops.functional.linear_kl_div.inputs import Inputs
from torch_aclnn_ops.functional.linear_kl_div.teachers import Places, log_probabilities, log_probabilities_with_rest
from torch_aclnn_ops.ops._head.kept_rows import IGNORED

from torch import Tensor


@without_autocast
def losses_of_rows(inputs: Inputs) -> Tensor:
    """Return the loss of every row, 0 for an ignored one, with every derivative."""
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
    of_labels = None
    if inputs.labels is not None:
        columns = inputs.labels.clamp(0, student.shape[1] - 1).unsqueeze(1)
        of_labels = -(student * temperature).log_softmax(1).gather(1, columns).squeeze(1)
    if teacher.indices is not None:
        student = Places.of(teacher, inputs.classes).log_probabilities(student)
        of_teacher = log_probabilities_with_rest(teacher, student, measure.divergence)
    elif teacher.input is not None and teacher.weight is not None:
        of_teacher = _log_softmax(teacher.input, teacher.weight, teacher.bias, temperature)
    else:
        of_teacher = log_probabilities(teacher)
    losses, _ = measure.losses_and_slopes(student, of_teacher.to(student.dtype), inputs.may_be_masked)
    if of_labels is not None:
        losses = losses + measure.hard_weight * of_labels
    return losses if ignored is None else losses.masked_fill(ignored, 0)


def _log_softmax(input: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = widen(input) @ widen(weight).T
    if bias is not None:
        logits = logits + widen(bias)
    return (logits / temperature).log_softmax(1)
