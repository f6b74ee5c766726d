"""What a loss has to know of logits that nobody has computed, and which operations leave it known."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch_aclnn_ops import functional as F
from torch_aclnn_ops._numerics import is_autocast_on
from torch_aclnn_ops._torch_compat.fsdp import modules_sharded_with
from torch_aclnn_ops._torch_compat.optimizer import version_of

import torch
from torch import Tensor, nn
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor of torch's own class."""
    return type(value) in _PLAIN


class Layer(NamedTuple):
    """Outputs of a linear layer, divided by a number; with its weights, versions, and the dtype of autocast."""

    input: Tensor
    linear: nn.Linear
    weight: Tensor
    versions: tuple[int, int] | None
    autocast: torch.dtype | None
    divisor: float = 1.0

    def output(self) -> Tensor:
        """Return the outputs, not divided."""
        return self.output_of(self.input)

    def output_of(self, input: Tensor, *weights: Any) -> Tensor:
        """Return the outputs of rows in the place of the input, and of weights in the place of the layer's."""
        self.check_versions()
        with self.saved_autocast():
            if weights:
                _check_whole(self.linear)
                return nn.functional.linear(input, *weights)
            return with_weights(self.linear, input, nn.Linear.forward)

    def check_versions(self) -> None:
        """Raise if the outputs would not be those of the forward pass."""
        if self.versions is not None and versions(self.input, self.weight) != self.versions:
            raise RuntimeError(
                "the logits of this forward pass cannot be computed any more, because the head's weights have"
                " changed since, or its input; use the model's logits before the optimizer's step"
            )

    def saved_autocast(self) -> AbstractContextManager[None]:
        """Return a context in which autocast is as it was when the layer was called."""
        is_on = self.autocast is not None
        if is_autocast_on(self.input) == is_on:
            return nullcontext()
        return torch.autocast(self.input.device.type, self.autocast, enabled=is_on)

    def divided(self, number: float) -> "Layer":
        """Return the layer with another divisor."""
        return Layer(*self[:-1], self.divisor * number)  # not _replace, after which Dynamo of 2.9 cannot return it

    def of_rows(self, sizes: list[int], places: list[int], offset: int) -> "Layer":
        """Return the layer with rows of its input, given as sizes and strides."""
        self.check_versions()
        input = _rows(self.input, sizes, places, offset)
        read = None if self.versions is None else (version_of(input), self.versions[1])
        return Layer(input, self.linear, self.weight, read, self.autocast, self.divisor)


def versions(input: Tensor, weight: Tensor) -> tuple[int, int]:
    """Return how often a layer's tensors were written to."""
    return version_of(input), version_of(weight)


class Layout(NamedTuple):
    """Where the elements of a view are, in logits that lie row after row."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class LogitSum:
    """A sum of linear layers' outputs and vectors, maybe bounded by a tanh, and which rows of it.

    Args:
        layers: those whose outputs are summed.
        vectors: tensors of as many elements as there are classes, and what each is divided by.
        bound: if given, the logits are ``bound * tanh(sum)``.
        dtype: the logits' dtype.
        options: of :func:`torch_aclnn_ops.functional.linear_cross_entropy`, which the head was patched with.
        layout: of a view; by default the logits lie row after row.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        vectors: tuple[tuple[Tensor, float], ...],
        bound: float | None,
        dtype: torch.dtype,
        options: dict[str, Any],
        layout: Layout | None = None,
    ) -> None:
        self.layers = layers
        self.vectors = vectors
        self.bound = bound
        self.dtype = dtype
        self.options = options
        self.classes: int = layers[0].linear.out_features
        self.whole = (*layers[0].input.shape[:-1], self.classes)
        self.layout = layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The logits' shape."""
        return self.whole if self.layout is None else self.layout.sizes

    @property
    def device(self) -> torch.device:
        """The logits' device."""
        return self.layers[0].input.device

    def probe(self) -> Tensor:
        """Return a tensor without memory that has the logits' dtype, shape and strides."""
        whole = torch.empty(self.whole, dtype=self.dtype, device="meta")
        return whole if self.layout is None else whole.as_strided(*self.layout)

    def viewed(self, view: Tensor, offset: int = 0) -> "LogitSum":
        """Return these logits in the place that a view of the probe has, which begins an offset after it."""
        if self.layout is not None:
            offset = self.layout.offset + offset
        layout = Layout(tuple(view.shape), view.stride(), offset)
        return LogitSum(self.layers, self.vectors, self.bound, self.dtype, self.options, layout)

    def in_rows(self, class_dim: int = -1) -> "LogitSum | None":
        """Return the same logits, row after row with the classes last; None if the view has other than whole rows."""
        if self.layout is None:
            return self if class_dim in (-1, len(self.whole) - 1) else None
        sizes, strides, offset = list(self.layout.sizes), list(self.layout.strides), self.layout.offset
        if not sizes or sizes.pop(class_dim) != self.classes or strides.pop(class_dim) != 1:
            return None
        if any(number % self.classes for number in (*strides, offset)):
            return None
        places = [stride // self.classes for stride in strides]
        layers = tuple(layer.of_rows(sizes, places, offset // self.classes) for layer in self.layers)
        return LogitSum(layers, self.vectors, self.bound, self.dtype, self.options)

    def _elementwise(self) -> "LogitSum | None":
        """Return the logits as operands whose result lies row after row; None where it would lie as a view does."""
        lies_so = self.layout is None or torch.empty_like(self.probe()).is_contiguous()
        return self.in_rows() if lies_so else None

    def cast(self, dtype: torch.dtype) -> "LogitSum | None":
        """Return the logits in another dtype; the loss is that of logits that were never rounded to it."""
        rows = self._elementwise()
        return rows and LogitSum(rows.layers, rows.vectors, rows.bound, dtype, rows.options)

    def divided(self, number: Any) -> "LogitSum | None":
        """Return the logits divided by a positive number."""
        rows = self._elementwise()
        if rows is None or type(number) not in (int, float) or not 0 < number < math.inf or not 0 < 1 / number:
            return None
        if rows.bound is not None:
            return LogitSum(rows.layers, rows.vectors, rows.bound / number, rows.dtype, rows.options)
        layers = tuple(layer.divided(number) for layer in rows.layers)
        vectors = tuple((vector, divisor * number) for vector, divisor in rows.vectors)
        return LogitSum(layers, vectors, None, rows.dtype, rows.options)

    def tanh(self) -> "LogitSum | None":
        """Return the hyperbolic tangent, which a softcap is made of."""
        rows = self._elementwise()
        if rows is None or rows.bound is not None:
            return None
        return LogitSum(rows.layers, rows.vectors, 1.0, rows.dtype, rows.options)

    def plus(self, other: Any) -> "LogitSum | None":
        """Return the sum with other such logits, or with a number for each class."""
        rows = self._elementwise()
        if rows is None or rows.bound is not None:
            return None
        if isinstance(other, LogitSum):
            others = other._elementwise()
            if others is None or others.bound is not None or rows.shape != others.shape:
                return None
            layers, vectors = (*rows.layers, *others.layers), (*rows.vectors, *others.vectors)
        elif (
            is_plain(other)
            and other.numel() == self.classes
            and other.shape[-1:] == (self.classes,)
            and other.ndim <= len(rows.shape)
            and other.dtype in (rows.dtype, rows.layers[0].weight.dtype)
            and other.device == self.device
        ):
            layers, vectors = rows.layers, (*rows.vectors, (other, 1.0))
        else:
            return None
        return LogitSum(layers, vectors, None, torch.promote_types(rows.dtype, other.dtype), rows.options)

    def cross_entropy(self, target: Any, **options: Any) -> Tensor | None:
        """Return what :func:`torch.nn.functional.cross_entropy` would of the logits, or None for its own error."""
        class_dim = 1 if len(self.shape) > 1 else 0
        rows = self.in_rows(class_dim)
        if rows is None or not isinstance(target, Tensor) or target.device != self.device:
            return None
        if target.shape != rows.shape[:-1] or target.is_floating_point():
            return None  # probabilities, and what does not fit
        is_float32 = is_autocast_on(target) and self.dtype != torch.float64
        with rows.layers[0].saved_autocast():
            loss = rows.loss_of_rows(target.reshape(-1), {**self.options, **options})
        loss = loss.to(torch.float32 if is_float32 else self.dtype)
        return loss.reshape(rows.shape[:-1]) if options.get("reduction") == "none" else loss

    def loss_of_rows(self, target: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the loss of all rows by :func:`torch_aclnn_ops.functional.linear_cross_entropy`."""
        first, *others = self.layers
        divisor = first.divisor
        if self.bound is None:
            options["temperature"] = divisor
        else:
            options |= {"softcap": divisor, "temperature": divisor / self.bound}
        vector = _total(tuple((one, by / divisor) for one, by in self.vectors))
        if not others:

            def call(linear: nn.Linear, input: Tensor) -> Tensor:
                bias = _total(tuple((one, 1.0) for one in (linear.bias, vector) if one is not None))
                return _cross_entropy(input, linear.weight, bias, target, options)

            return with_weights(first.linear, first.input, call)
        # The sum of layers is one layer of all their features.
        rows, weights, biases = [], [], [] if vector is None else [(vector, 1.0)]
        for layer in self.layers:
            linear, factor = layer.linear, divisor / layer.divisor
            _check_whole(linear)
            rows.append((layer.input if factor == 1 else layer.input * factor).to(first.input.dtype))
            weights.append(linear.weight.to(first.linear.weight.dtype))
            if linear.bias is not None:
                biases.append((linear.bias, 1 / factor))
        return _cross_entropy(torch.cat(rows, -1), torch.cat(weights, -1), _total(tuple(biases)), target, options)


def _rows(input: Tensor, sizes: list[int], places: list[int], offset: int) -> Tensor:
    """Return rows of a layer's input, given as sizes and strides."""
    features = input.shape[-1]
    count = 1
    contiguous: list[int] = []
    for size in reversed(sizes):
        contiguous.insert(0, count)
        count *= size
    if count == input.shape[:-1].numel() and offset == 0 and places == contiguous:
        return input.reshape(*sizes, features)
    strides = [place * features for place in places]
    return input.contiguous().view(-1).as_strided((*sizes, features), (*strides, 1), offset * features)


def _total(vectors: tuple[tuple[Tensor, float], ...]) -> Tensor | None:
    """Return the sum of vectors, each divided by its number."""
    total = None
    for vector, divisor in vectors:
        part = vector.reshape(-1) if divisor == 1 else vector.reshape(-1) / divisor
        total = part if total is None else total + part
    return total


def with_weights(linear: nn.Linear, input: Tensor, function: Callable[[nn.Linear, Tensor], Tensor]) -> Tensor:
    """Call a function of a layer where its weights are whole."""

    def checked(linear: nn.Linear, input: Tensor) -> Tensor:
        _check_whole(linear)
        return function(linear, input)

    if is_plain(linear.weight):
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
    is_whole = is_plain(weight) and weight.shape == shape
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
    bias = None if bias is None else bias.to(weight.dtype)
    loss: Tensor = F.linear_cross_entropy(
        input.reshape(-1, input.shape[-1]), weight, target, linear_bias=bias, **options
    )
    return loss
