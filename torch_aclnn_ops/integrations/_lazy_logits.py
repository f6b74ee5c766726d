"""Logits that nobody has computed: what the head of a patched model returns in training."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch_aclnn_ops import functional as F
from torch_aclnn_ops._nested import map_nested
from torch_aclnn_ops._numerics import is_autocast_on
from torch_aclnn_ops._torch_compat.fsdp import modules_sharded_with
from torch_aclnn_ops._torch_compat.optimizer import version_of

import torch
from torch import Tensor, nn
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)


class _Layer(NamedTuple):
    """Outputs of a linear layer, divided by a number; with its weights, their version, and the dtype of autocast."""

    input: Tensor
    linear: nn.Linear
    weight: Tensor
    version: int | None
    autocast: torch.dtype | None
    divisor: float = 1.0

    def output(self) -> Tensor:
        """Return the outputs, not divided."""
        if self.version is not None and version_of(self.weight) != self.version:
            raise RuntimeError(
                "the logits of this forward pass cannot be computed any more, because the head's weights have changed"
                " since; use the model's logits before the optimizer's step"
            )
        with self.saved_autocast():
            return _with_weights(self.linear, self.input, nn.Linear.forward)

    def saved_autocast(self) -> AbstractContextManager[None]:
        """Return a context in which autocast is as it was when the layer was called."""
        is_on = self.autocast is not None
        if is_autocast_on(self.input) == is_on:
            return nullcontext()
        return torch.autocast(self.input.device.type, self.autocast, enabled=is_on)


class LazyLogits:
    """Logits as the layers and rows that they are made of: a sum of linear layers' outputs, maybe bounded by a tanh.

    It stands for the tensor: its operators, its methods and every function of torch compute the logits and go on with
    them. Only what leaves the sum and its bound in place is put off: factors, sums with others, ``torch.tanh`` and
    casts. No tensor itself, it goes untouched through what wraps models and looks for tensors in their outputs.

    Args:
        layers: the sum.
        bound: if given, the logits are ``bound * tanh(sum)``.
        dtype: the logits' dtype.
        method: computes the logits, a method of the first operand.
        operands: those that are lazy are computed first.
    """

    def __init__(
        self,
        layers: tuple[_Layer, ...],
        bound: float | None,
        dtype: torch.dtype,
        method: str,
        *operands: Any,
    ) -> None:
        self._layers = layers
        self._bound = bound
        self._method = method
        self._operands = operands
        self._tensor: Tensor | None = None
        self.dtype = dtype
        self.device = layers[0].input.device
        self.shape = torch.Size((*layers[0].input.shape[:-1], layers[0].linear.out_features))

    @property
    def is_computed(self) -> bool:
        """Whether there is a tensor, which others may have written to."""
        return self._tensor is not None

    def materialize(self) -> Tensor:
        """Return the logits, always the same tensor."""
        if self._tensor is None:
            with torch.enable_grad():  # whoever reads them first may not want derivatives, and the next one may
                self._tensor = self._compute()
        return self._tensor

    def _compute(self) -> Tensor:
        # An operand's own tensor may have been written to since, so it is not used.
        first, *others = [one._compute() if isinstance(one, LazyLogits) else one for one in self._operands]
        logits: Tensor = getattr(first, self._method)(*others)
        return logits

    def cross_entropy(self, target: Tensor, **options: Any) -> Tensor:
        """Return the loss of the rows by :func:`torch_aclnn_ops.functional.linear_cross_entropy`.

        Args:
            target: class indices, one for each row.
            **options: its other arguments, but those that shape the logits.
        """
        first, *others = self._layers
        divisor = first.divisor
        if self._bound is None:
            options["temperature"] = divisor
        else:
            options |= {"softcap": divisor, "temperature": divisor / self._bound}
        if not others:
            with first.saved_autocast():
                return _with_weights(
                    first.linear,
                    first.input,
                    lambda linear, input: _cross_entropy(input, linear.weight, linear.bias, target, options),
                )
        # The sum of layers is one layer of all their features.
        rows, weights, bias = [], [], None
        for layer in self._layers:
            linear, factor = layer.linear, divisor / layer.divisor
            _check_whole(linear)
            rows.append((layer.input if factor == 1 else layer.input * factor).to(first.input.dtype))
            weights.append(linear.weight.to(first.linear.weight.dtype))
            if linear.bias is not None:
                bias = linear.bias * factor + (0 if bias is None else bias)
        with first.saved_autocast():
            return _cross_entropy(torch.cat(rows, -1), torch.cat(weights, -1), bias, target, options)

    def _scaled(self, method: str, number: Any) -> Any:
        if type(number) not in (int, float) or not 0 < number < math.inf or self.is_computed:
            return getattr(self.materialize(), method)(number)
        divides = method == "div"
        layers, bound = self._layers, self._bound
        if bound is not None:
            bound = bound / number if divides else bound * number
        else:
            # Not _replace, after which Dynamo of 2.9 cannot return them.
            layers = tuple(
                _Layer(*layer[:-1], layer.divisor * number if divides else layer.divisor / number) for layer in layers
            )
        return LazyLogits(layers, bound, self.dtype, method, self, number)

    def __mul__(self, other: Any) -> Any:
        return self._scaled("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._scaled("div", other)

    def __add__(self, other: Any) -> Any:
        if (
            isinstance(other, LazyLogits)
            and self._bound is other._bound is None
            and self.shape == other.shape
            and not (self.is_computed or other.is_computed)
        ):
            dtype = torch.promote_types(self.dtype, other.dtype)
            return LazyLogits((*self._layers, *other._layers), None, dtype, "add", self, other)
        return self.materialize() + (other.materialize() if isinstance(other, LazyLogits) else other)

    def __radd__(self, other: Any) -> Any:
        return other + self.materialize()

    def tanh(self) -> Any:
        """Return the hyperbolic tangent, which a softcap is made of."""
        if self._bound is not None or self.is_computed:
            return self.materialize().tanh()
        return LazyLogits(self._layers, 1.0, self.dtype, "tanh", self)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits in another dtype; the loss is that of logits that were never rounded to it."""
        is_dtype = len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype)
        if self.is_computed or not is_dtype or not args[0].is_floating_point:
            return self.materialize().to(*args, **kwargs)
        if args[0] == self.dtype:
            return self
        return LazyLogits(self._layers, self._bound, args[0], "to", self, args[0])

    def float(self) -> Any:
        """Return the logits in float32."""
        return self.to(torch.float32)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.tanh, Tensor.tanh) and len(args) == 1 and not kwargs:
            return args[0].tanh()
        args, kwargs = map_nested(materialized, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.materialize(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    def call(self: LazyLogits, *operands: Any) -> Any:
        return getattr(self.materialize(), name)(*map(materialized, operands))

    return call


# Python looks for these in the class, not in what __getattr__ finds.
for _name in (
    "sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs invert and or xor lt le eq ne gt"
    " ge getitem setitem iter len contains bool int float array"
).split():
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))


def materialized(value: Any) -> Any:
    """Return the tensor that a value stands for, and other values as they are."""
    return value.materialize() if isinstance(value, LazyLogits) else value


def forward(linear: nn.Linear, input: Tensor, *, function: Callable[[nn.Linear, Tensor], Tensor] | None = None) -> Any:
    """Be the forward of a linear layer: lazy in training, and the place to call a function where weights are whole."""
    if function is not None:
        return function(linear, input)
    is_plain = type(linear.weight) in _PLAIN and type(input) in _PLAIN
    if not (is_plain and linear.training and torch.is_grad_enabled()):
        return nn.Linear.forward(linear, input)
    weight = linear.weight
    autocast = torch.get_autocast_dtype(input.device.type) if is_autocast_on(input) else None
    version = None if torch.compiler.is_compiling() else version_of(weight)
    layer = _Layer(input, linear, weight, version, autocast)
    dtype = weight.dtype if autocast is None or weight.dtype == torch.float64 else autocast
    return LazyLogits((layer,), None, dtype, "output", layer)


def _with_weights(linear: nn.Linear, input: Tensor, function: Callable[[nn.Linear, Tensor], Tensor]) -> Tensor:
    """Call a function of a layer where its weights are whole."""

    def checked(linear: nn.Linear, input: Tensor) -> Tensor:
        _check_whole(linear)
        return function(linear, input)

    if type(linear.weight) in _PLAIN:
        return checked(linear, input)
    if modules_sharded_with(linear) > 1:
        raise RuntimeError(
            "fully_shard has sharded the head together with other modules, which do not keep their weights for the"
            " loss: give the head a call of fully_shard of its own, or this one reshard_after_forward=False"
        )
    # FSDP2 has sharded this layer by itself, and gathers its weights in its forward.
    result: Tensor = linear(input, function=checked)
    return result


def _check_whole(linear: nn.Linear) -> None:
    weight, shape = linear.weight, (linear.out_features, linear.in_features)
    is_whole = type(weight) in _PLAIN and weight.shape == shape
    if is_whole and (torch.compiler.is_compiling() or weight.untyped_storage().nbytes() > 0):
        return
    raise RuntimeError(
        "the head's weights are not whole where the loss is computed: FSDP1 and ZeRO-3 (DeepSpeed) show them only in"
        " the forward pass of the module that they wrap. Use fully_shard (FSDP2), shard the head with the whole model,"
        " or call unpatch_model"
    )


def _cross_entropy(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: dict[str, Any]
) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    loss: Tensor = F.linear_cross_entropy(rows, weight, target.reshape(-1), linear_bias=bias, **options)
    return loss
