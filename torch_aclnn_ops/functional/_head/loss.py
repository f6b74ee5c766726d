"""What a loss on a head supplies to the engine, and what follows from the type of its calls."""

from collections.abc import Collection, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops.ops._head import HeadGradients, Results

from torch import Tensor

HEAD_TENSORS = 3  # input, weight and bias of the head: a call's first fields, by which the kernels differentiate
_SCHEMAS = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str", tuple: "bool[]"}


class HeadLoss:
    """A loss on a head whose results are the losses of rows; another one overrides what differs.

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
        """Return which results the caller gets beside the total."""
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
        """Return the tensors of a call that kernels read, but the first three."""
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
