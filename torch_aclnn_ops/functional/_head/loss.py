"""What a loss on a head supplies to the engine, and the operator for ``torch.compile`` that follows from it."""

from collections.abc import Collection, Sequence
from itertools import compress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops._autograd.raw_operator import NAMESPACE
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops.ops._chunks import HeadGradients, Results

import torch
from torch import Tensor

HEAD_TENSORS = 3  # input, weight and bias of the head: a call's first fields, by which the kernels differentiate
_SCHEMAS = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str", tuple: "bool[]"}


class HeadLoss:
    """A loss on a head whose results are the losses of rows; other losses override what differs.

    A call is a named tuple of tensors and constants. Its first three fields are the input, of shape (N, H), the weight
    and the bias of the head; ``gradients`` says which of these need a gradient. The results of a call are tensors of
    shape (N,). Factors are tensors of the same shape, or ``None``.

    Args:
        name: The function's name.
        call: The type of its calls.
        unread: The fields that neither :meth:`reduce` nor :meth:`formula` reads; in compiled code they have their
            defaults there.
        of_rows: The other fields that have a value for each row.
    """

    number_of_factors = 1
    #: How many of the results, from the first on, backward_call() reads. The others may be changed in place.
    number_of_saved = 0

    def __init__(self, name: str, call: Any, unread: Collection[str], of_rows: Collection[str]) -> None:
        self.name, names, types = name, list(call._fields), get_type_hints(call)
        self._sent = [place for place, field in enumerate(names) if field not in unread]
        schemas = [_schema_of(types[names[place]]) for place in self._sent]
        pairs = list(zip(self._sent, schemas, strict=True))
        self._tensors = [place for place, schema in pairs[HEAD_TENSORS:] if schema.startswith("Tensor")]
        self._of_rows = [names.index(field) for field in of_rows]
        self._call = call
        #: The arguments that a call is flattened to for ``torch.compile``.
        self.schema = ", ".join(f"{schema} {names[i]}" for i, schema in pairs)

    def reduce(self, call: Any, factors: Sequence[Tensor | None] | None) -> tuple[Results, HeadGradients]:
        """Compute the results, and with factors the gradients of :meth:`total` by input, weight and bias.

        No results are needed of a :meth:`backward_call`.
        """
        raise NotImplementedError

    def formula(self, call: Any) -> Results:
        """Compute the results in differentiable torch calls, all rows at once."""
        raise NotImplementedError

    def chunks(self, call: Any) -> Sequence[slice]:
        """Return the ranges of rows whose logits are computed at a time."""
        found: list[slice] = call.tile_rows(call.input.shape[0]).chunks()
        return found

    def check_formula(self, call: Any) -> None:
        """Raise if the formula cannot compute the call."""

    def total(self, call: Any, results: Results, factors: Sequence[Tensor | None]) -> Tensor:
        """Return the scalar that results and factors give."""
        assert factors[0] is not None
        return (results[0] * factors[0]).sum()

    def differentiable(self, call: Any) -> range:
        """Return which results have derivatives."""
        return range(1)

    def beside_total(self, call: Any) -> range:
        """Return which results the caller gets together with the total."""
        return range(0)

    def backward_call(self, call: Any, results: Results) -> Any:
        """Return the call that recomputes the gradients of these results."""
        return call

    def factors_of(self, call: Any, grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the factors for which the total has the gradients of the results, given theirs."""
        return (grads[0].contiguous(),)

    def empty(self, call: Any) -> list[Tensor]:
        """Return uninitialized results."""
        return [call.input.new_empty(call.input.shape[0], dtype=accumulation_dtype(call.input.dtype))]

    def tensors(self, call: Any) -> list[Tensor | None]:
        """Return the tensors of a call that kernels read, except the first three."""
        return [call[place] for place in self._tensors]

    def replace(self, call: Any, of_head: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> Any:
        """Return the call with other tensors."""
        values = list(call)
        for place, tensor in zip((*range(HEAD_TENSORS), *self._tensors), (*of_head, *tensors), strict=True):
            values[place] = tensor
        return self._call._make(values)

    def rows_of(self, call: Any, rows: slice) -> Any:
        """Return the call for a range of rows."""
        values = list(call)
        for place in (0, *self._of_rows):
            values[place] = None if call[place] is None else call[place][rows]
        return self._call._make(values)

    def flatten(self, call: Any) -> tuple[Any, ...]:
        """Return the arguments of the schema."""
        return tuple([call[place] for place in self._sent])

    def unflatten(self, arguments: Sequence[Any]) -> Any:
        """Undo :meth:`flatten`."""
        call = self._call(**{self._call._fields[i]: one for i, one in zip(self._sent, arguments, strict=True)})
        return call._replace(gradients=tuple(call.gradients))


def _schema_of(annotation: Any) -> str:
    """Return the type of an operator's argument."""
    if get_origin(annotation) in (Union, UnionType):
        (one,) = (kind for kind in get_args(annotation) if kind is not NoneType)
        return f"{_schema_of(one)}?"
    if get_origin(annotation) is Literal:
        return "str"
    return _SCHEMAS[get_origin(annotation) or annotation]


class HeadOperator:
    """A loss as a custom operator for ``torch.compile``, which would unroll the loop over chunks.

    It returns the results of rows, or with factors the total, the gradients, and what goes with them.
    """

    def __init__(self, loss: HeadLoss) -> None:
        self._loss, self._factors = loss, loss.number_of_factors
        factors = "".join(f", Tensor? factor_{i}" for i in range(self._factors))
        self._operator = torch.library.custom_op(
            f"{NAMESPACE}::{loss.name}", self._compute, mutates_args=(), schema=f"({loss.schema}{factors}) -> Tensor[]"
        )
        self._operator.register_fake(self._fake)
        self._operator.register_autograd(self._differentiate, setup_context=self._save)

    def rows(self, call: Any) -> tuple[Tensor, ...]:
        """Return the results of every row."""
        return tuple(self._operator(*self._loss.flatten(call), *(None,) * self._factors))

    def total(self, call: Any, factors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the total, and what goes with it."""
        total, *others = self._operator(*self._loss.flatten(call), *factors)
        return total, *others[sum(call.gradients) :]

    def _split(self, args: Sequence[Any]) -> tuple[Any, Sequence[Tensor | None] | None]:
        factors = args[-self._factors :]
        return self._loss.unflatten(args[: -self._factors]), None if factors[0] is None else factors

    def _compute(self, *args: Any) -> list[Tensor]:
        call, factors = self._split(args)
        results, made = self._loss.reduce(call, factors)
        if factors is None:
            return list(results)
        held = [gradient.to(_held_dtype(call[0])) for gradient in made if gradient is not None]
        if not results:  # a backward pass, which uses the gradients alone
            return [call[0].new_zeros((), dtype=accumulation_dtype(call[0].dtype)), *held]
        others = [results[i] for i in self._loss.beside_total(call)]
        return [self._loss.total(call, results, factors), *held, *others]

    def _fake(self, *args: Any) -> list[Tensor]:
        call, factors = self._split(args)
        results = self._loss.empty(call)
        if factors is None:
            return results
        dtype = _held_dtype(call[0])
        needed = compress(args, call.gradients)
        total = call[0].new_empty((), dtype=accumulation_dtype(call[0].dtype))
        held = [argument.new_empty(argument.shape, dtype=dtype) for argument in needed]
        return [total, *held, *(results[i] for i in self._loss.beside_total(call))]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        call, factors = self._split(inputs)
        ctx.has_factors, ctx.number = factors is not None, len(inputs)
        ctx.needed = call.gradients if ctx.has_factors else tuple(ctx.needs_input_grad[:HEAD_TENSORS])
        ctx.dtypes = [argument.dtype for argument in compress(inputs, ctx.needed)]
        if ctx.has_factors:
            ctx.save_for_backward(*output[1 : 1 + sum(ctx.needed)])
            return
        flat = inputs[: -self._factors]
        ctx.places = [i for i, one in enumerate(flat) if isinstance(one, Tensor)]
        ctx.constants = [None if i in ctx.places else one for i, one in enumerate(flat)]
        ctx.save_for_backward(*(flat[i] for i in ctx.places), *output[: self._loss.number_of_saved])
        ctx.set_materialize_grads(True)

    def _differentiate(self, ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self._loss.name}: a compiled call must not be differentiated with create_graph=True, because its"
                " operator has a first derivative only; call it outside of torch.compile"
            )
        if ctx.has_factors:
            made = [gradient * grads[0] for gradient in ctx.saved_tensors]
        else:
            flat, saved = list(ctx.constants), ctx.saved_tensors
            for place, tensor in zip(ctx.places, saved, strict=False):
                flat[place] = tensor
            call = self._loss.unflatten(flat)._replace(gradients=ctx.needed)  # not those of an export
            results = tuple(saved[len(ctx.places) :])
            again = self._loss.backward_call(call, results)
            factors = self._loss.factors_of(call, grads)
            made = self._operator(*self._loss.flatten(again), *factors)[1 : 1 + sum(ctx.needed)]
        found = [gradient.to(dtype) for gradient, dtype in zip(made, ctx.dtypes, strict=True)]
        return *scatter(ctx.needed, found), *(None,) * (ctx.number - HEAD_TENSORS)


def _held_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of saved gradients: float32 for float16, whose values underflow before they are scaled."""
    return torch.float32 if input.dtype == torch.float16 else input.dtype
