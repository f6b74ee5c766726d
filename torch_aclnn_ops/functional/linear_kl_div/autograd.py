"""The divergence for the engine of losses on a head: its results are the losses of rows."""

from collections.abc import Sequence
from typing import Any

from torch_aclnn_ops.functional._head.engine import Engine
from torch_aclnn_ops.functional._head.loss import HeadLoss
from torch_aclnn_ops.functional.linear_kl_div.call import NAME, Call
from torch_aclnn_ops.functional.linear_kl_div.chunks import losses_in_chunks
from torch_aclnn_ops.functional.linear_kl_div.formula import losses_of_rows
from torch_aclnn_ops.ops._head.chunks import HeadGradients, Results

from torch import Tensor

_OF_ROWS = ("target", "teacher_input", "teacher_values", "teacher_indices")
_FIELDS = (
    *(*_OF_ROWS, "teacher_weight", "teacher_bias", "is_log", "divergence", "beta", "hard_weight", "temperature"),
    *("chunk_size", "max_memory", "gradients", "recomputes"),
)


class _Divergence(HeadLoss):
    def reduce(self, call: Call, factors: Sequence[Tensor | None] | None) -> tuple[Results, HeadGradients]:
        return losses_in_chunks(call, None if factors is None else factors[0])

    def formula(self, call: Call) -> Results:
        return (losses_of_rows(call),)

    def backward_call(self, call: Call, results: Results) -> Call:
        return call._replace(recomputes=True)

    def check_formula(self, call: Call, in_backward: bool) -> None:
        if call.shards is not None and in_backward:
            raise RuntimeError(
                f"{NAME}: with process_group only first derivatives are supported, but this is a backward pass with"
                " create_graph=True or is_grads_batched=True"
            )
        if call.shards is not None:
            raise NotImplementedError(
                f"{NAME}: process_group must be None inside transforms of torch.func, torch.jit.trace and forward-mode"
                " AD, which do not differentiate its collectives"
            )

    def flatten(self, call: Call) -> tuple[Any, ...]:
        if call.shards is not None:  # a graph break, also where Dynamo compiles the frames below the one that broke
            raise NotImplementedError(f"{NAME}: process_group is not supported in compiled code")
        return super().flatten(call)


ENGINE = Engine(_Divergence(NAME, Call, _FIELDS, _OF_ROWS))
