"""Whether the processes that share a vocabulary make the same call."""

from torch_aclnn_ops._autograd.derivatives import any_differentiated
from torch_aclnn_ops.functional._head.agreement import ROWS, compare_summaries, summarize
from torch_aclnn_ops.functional._head.collectives import gather_constant
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.functional.linear_kl_div.inputs import NAME, Inputs

import torch
from torch import Tensor


def check_agreement(
    inputs: Inputs,
    shards: VocabularyShards,
    reduction: str,
    token_weight: Tensor | None,
    zero_if_all_ignored: bool,
) -> Inputs:
    """Compare the calls of all processes in a collective.

    Returns:
        The inputs, whose results are nan where the calls differ and values cannot be read.

    Raises:
        NotImplementedError: the call is compiled.
        ValueError: the calls differ.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{NAME}: process_group is not supported with torch.compile(fullgraph=True); compile with fullgraph=False,"
            " so that the graph breaks at this call"
        )
    input, measure, logits = inputs.input, inputs.options.measure, inputs.options.logits
    call = {
        ROWS: input.shape[0],
        "the number of features of input": input.shape[1],
        "vocab_sizes": shards.sizes,
        "reduction": reduction,
        "divergence": measure.divergence,
        "beta": measure.beta,
        "hard_weight": measure.hard_weight,
        "temperature": logits.temperature,
        "the rows per chunk, from chunk_size or max_memory,": inputs.tile(input.shape[0]).rows_per_chunk,
        "reduce_input_grad": inputs.reduce_input_grad,
        "whether input needs a gradient": inputs.reduce_input_grad and any_differentiated([input]),
        "zero_if_all_ignored": zero_if_all_ignored,
        "whether token_weight is given": token_weight is not None,
        "whether a gradient is needed": any_differentiated(inputs.student),
    }
    weights = token_weight, None
    summary = summarize(
        call,
        (shards.excess, shards.sizes),
        input,
        inputs.linear_weight,
        inputs.target,
        _of_teacher(inputs),
        inputs.loss_dtype(),
        weights,
    )
    summaries = gather_constant(torch.cat(summary.sent), shards.members)
    factor = compare_summaries(NAME, call, summary, summaries, shards.sizes, ("input", "teacher"))
    return inputs if factor is None else inputs._replace(input=input * factor.to(input.dtype))


def _of_teacher(inputs: Inputs) -> Tensor | None:
    """Return the teacher's tensor that must be the same on every process."""
    teacher = inputs.teacher
    return teacher.values if teacher.indices is not None else teacher.input
