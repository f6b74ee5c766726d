"""Whether the processes that share a vocabulary make the same call."""

from torch_aclnn_ops._autograd.derivatives import any_differentiated
from torch_aclnn_ops.functional._head.agreement import ROWS, compare_summaries, nan_if, summarize
from torch_aclnn_ops.functional._head.collectives import gather_constant
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.functional.linear_kl_div.call import NAME, Call

import torch
from torch import Tensor

# Options that must be the same on all processes.
_AGREED = (
    *("reduction", "divergence", "beta", "hard_weight", "temperature"),
    *("reduce_input_grad", "zero_if_all_ignored"),
)


def check_agreement(call: Call, shards: VocabularyShards, token_weight: Tensor | None) -> Call:
    """Compare the calls of all processes in a collective.

    Returns:
        The call, whose results are nan where the calls differ and values cannot be read.

    Raises:
        ValueError: the calls differ.
    """
    input, student = call.input, (call.input, call.linear_weight, call.linear_bias)
    agreed = {
        ROWS: input.shape[0],
        "the number of features of input": input.shape[1],
        "vocab_sizes": shards.sizes,
        **{name: getattr(call, name) for name in _AGREED},
        "the rows per chunk, from chunk_size or max_memory,": call.tile_rows(input.shape[0]).rows_per_chunk,
        "whether input needs a gradient": call.reduce_input_grad and any_differentiated([input]),
        "whether token_weight is given": token_weight is not None,
        "whether a gradient is needed": any_differentiated(student),
    }
    weights = token_weight, None
    summary = summarize(
        agreed,
        (shards.excess, shards.sizes),
        input,
        call.linear_weight,
        call.target,
        _of_teacher(call),
        call.loss_dtype(),
        weights,
    )
    summaries = gather_constant(torch.cat(summary.sent), shards.members)
    disagree = compare_summaries(NAME, agreed, summary, summaries, shards.sizes, ("input", "teacher"))
    return call if disagree is None else call._replace(input=input * nan_if(disagree, input.dtype))


def _of_teacher(call: Call) -> Tensor | None:
    """Return the teacher's tensor that must be the same on every process."""
    return call.teacher_values if call.teacher_indices is not None else call.teacher_input
