"""The divergence for the engine of losses on a head: its results are the losses of rows."""

from collections.abc import Sequence
from typing import Any

from torch_aclnn_ops.functional._head.engine import Engine
from torch_aclnn_ops.functional.linear_kl_div.chunks import losses_in_chunks
from torch_aclnn_ops.functional.linear_kl_div.divergences import Measure
from torch_aclnn_ops.functional.linear_kl_div.formula import losses_of_rows
from torch_aclnn_ops.functional.linear_kl_div.inputs import NAME, Inputs, Options, Teacher
from torch_aclnn_ops.ops._head.chunks import HeadGradients, Results
from torch_aclnn_ops.ops._head.tiling import LogitOptions

from torch import Tensor

_STUDENT = 3  # the first fields of Inputs, by which a loss is differentiated


class _Divergence:
    name = NAME
    number_of_factors = 1
    schema = (
        "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor? teacher_input, Tensor? teacher_weight,"
        " Tensor? teacher_bias, Tensor? teacher_values, Tensor? teacher_indices, Tensor? target, bool is_log,"
        " str divergence, float beta, float hard_weight, float temperature, SymInt? chunk_size,"
        " SymInt? max_memory, bool[] gradients"
    )

    def reduce(self, call: Inputs, factors: Sequence[Tensor | None] | None) -> tuple[Results, HeadGradients]:
        losses, made = losses_in_chunks(call, None if factors is None else factors[0])
        return (losses,), made

    def formula(self, call: Inputs) -> Results:
        return (losses_of_rows(call),)

    def check_formula(self, call: Inputs, in_backward: bool) -> None:
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

    def total(self, call: Inputs, results: Results, factors: Sequence[Tensor | None]) -> Tensor:
        assert factors[0] is not None
        return (results[0] * factors[0]).sum()

    def differentiable(self, call: Inputs) -> range:
        return range(1)

    def beside_total(self, call: Inputs) -> range:
        return range(0)

    def backward_call(self, call: Inputs, results: Results) -> Inputs:
        return call

    def factors_of(self, call: Inputs, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        return (grads[0].contiguous(),)

    def tensors(self, call: Inputs) -> Sequence[Tensor | None]:
        *of_teacher, _ = call.teacher
        return *of_teacher, call.target

    def replace(self, call: Inputs, student: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> Inputs:
        *of_teacher, target = tensors
        return Inputs._make(
            (*student, Teacher._make((*of_teacher, call.teacher.is_log)), target, *call[_STUDENT + 2 :])
        )

    def rows_of(self, call: Inputs, rows: slice) -> Inputs:
        input, values, indices = (
            None if one is None else one[rows]
            for one in (call.teacher.input, call.teacher.values, call.teacher.indices)
        )
        teacher = call.teacher._replace(input=input, values=values, indices=indices)
        target = None if call.target is None else call.target[rows]
        return call._replace(input=call.input[rows], target=target, teacher=teacher)

    def chunks(self, call: Inputs) -> Sequence[slice]:
        return call.tile(call.input.shape[0]).chunks()

    def needed(self, call: Inputs) -> tuple[bool, bool, bool]:
        return call.options.gradients

    def empty(self, call: Inputs) -> list[Tensor]:
        return [call.input.new_empty(call.input.shape[0], dtype=call.loss_dtype())]

    def flatten(self, call: Inputs) -> tuple[Any, ...]:
        # Dynamo of torch 2.9 does not trace properties of named tuples.
        input, linear_weight, linear_bias, teacher, target, options, shards, _ = call
        if shards is not None:  # a graph break, also where Dynamo compiles the frames below the one that broke
            raise NotImplementedError(f"{NAME}: process_group is not supported in compiled code")
        *of_teacher, is_log = teacher
        measure, logits = options.measure, options.logits
        return (
            *(input, linear_weight, linear_bias, *of_teacher, target),
            *(is_log, measure.divergence, measure.beta, measure.hard_weight),
            *(logits.temperature, logits.chunk_size, logits.max_memory),
            options.gradients,
        )

    def unflatten(self, arguments: Sequence[Any]) -> Inputs:
        *tensors, target = arguments[:9]
        is_log, divergence, beta, hard_weight, temperature, chunk_size, max_memory, gradients = arguments[9:]
        logits = LogitOptions(None, temperature, chunk_size, max_memory, function=NAME)
        options = Options(Measure(divergence, beta, hard_weight), logits, tuple(gradients))
        teacher = Teacher._make((*tensors[_STUDENT:], is_log))
        return Inputs._make((*tensors[:_STUDENT], teacher, target, options, None, True))


ENGINE = Engine(_Divergence())
