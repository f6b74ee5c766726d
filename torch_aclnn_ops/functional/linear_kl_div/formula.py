"""The divergences of rows in differentiable torch calls, for derivatives that the kernel does not have."""

from torch_aclnn_ops._numerics import widen, without_autocast
from torch_aclnn_ops.functional.linear_kl_div.call import Call
from torch_aclnn_ops.functional.linear_kl_div.divergences import losses_and_slopes
from torch_aclnn_ops.functional.linear_kl_div.teachers import Places, log_probabilities, log_probabilities_with_rest
from torch_aclnn_ops.ops._head.kept_rows import IGNORED

from torch import Tensor


@without_autocast
def losses_of_rows(call: Call) -> Tensor:
    """Return the loss of every row, 0 for an ignored one, with every derivative."""
    ignored = None if call.target is None else call.target == IGNORED
    if ignored is not None:  # so that no derivative sees inf or nan
        column = ignored.unsqueeze(1)
        # Log-probabilities of 0, because the reverse KL is infinite for probabilities of 0.
        rows, values = call.teacher_input, call.teacher_values
        call = call._replace(
            input=call.input.masked_fill(column, 0),
            teacher_input=None if rows is None else rows.masked_fill(column, 0),
            teacher_values=None if values is None else values.masked_fill(column, 0 if call.is_log else 1),
        )
    temperature = call.temperature
    student = _log_softmax(call.input, call.linear_weight, call.linear_bias, temperature)
    of_labels = None
    if call.labels is not None:
        columns = call.labels.clamp(0, student.shape[1] - 1).unsqueeze(1)
        of_labels = -(student * temperature).log_softmax(1).gather(1, columns).squeeze(1)
    if call.teacher_indices is not None:
        student = Places.of(call).log_probabilities(student)
        teacher = log_probabilities_with_rest(call, student)
    elif call.teacher_input is not None and call.teacher_weight is not None:
        teacher = _log_softmax(call.teacher_input, call.teacher_weight, call.teacher_bias, temperature)
    else:
        teacher = log_probabilities(call)
    losses, _ = losses_and_slopes(call.divergence, call.beta, student, teacher.to(student.dtype), call.may_be_masked)
    assert losses is not None
    if of_labels is not None:
        losses = losses + call.hard_weight * of_labels
    return losses if ignored is None else losses.masked_fill(ignored, 0)


def _log_softmax(input: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = widen(input) @ widen(weight).T
    if bias is not None:
        logits = logits + widen(bias)
    return (logits / temperature).log_softmax(1)
