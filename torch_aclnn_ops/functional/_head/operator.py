"""A loss on a head as a custom operator for ``torch.compile``, which would unroll the loop over chunks."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops._autograd.raw_operator import NAMESPACE
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops.functional._head.loss import HEAD_TENSORS, HeadLoss

import torch
from torch import Tensor


class HeadOperator:
    """The operator of a loss: its results, or with factors the total, the gradients, and what goes with them."""

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
        ctx.needed, ctx.number = call.gradients, len(inputs)
        ctx.dtypes = [argument.dtype for argument in compress(inputs, ctx.needed)]
        ctx.has_factors = factors is not None
        if ctx.has_factors:
            ctx.save_for_backward(*output[1 : 1 + sum(ctx.needed)])
            return
        flat = inputs[: -self._factors]
        ctx.places = [i for i, one in enumerate(flat) if isinstance(one, Tensor)]
        ctx.constants = [None if i in ctx.places else one for i, one in enumerate(flat)]
        ctx.save_for_backward(*(flat[i] for i in ctx.places), *output)
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
            call, results = self._loss.unflatten(flat), tuple(saved[len(ctx.places) :])
            again = self._loss.backward_call(call, results)
            factors = self._loss.factors_of(call, grads)
            made = self._operator(*self._loss.flatten(again), *factors)[1 : 1 + sum(ctx.needed)]
        found = [gradient.to(dtype) for gradient, dtype in zip(made, ctx.dtypes, strict=True)]
        return *scatter(ctx.needed, found), *(None,) * (ctx.number - HEAD_TENSORS)


def _held_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of saved gradients: float32 for float16, whose values underflow before they are scaled."""
    return torch.float32 if input.dtype == torch.float16 else input.dtype
