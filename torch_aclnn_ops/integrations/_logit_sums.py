"""A symbolic form of lazy logits, the operations that it is closed under, and its cross entropy."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch_aclnn_ops import functional as F
from torch_aclnn_ops._autograd.derivatives import in_functorch_transform, recomputed
from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._tensors import accumulation_dtype, is_autocast_on, is_plain, widen
from torch_aclnn_ops._torch_compat.private import version_of
from torch_aclnn_ops.integrations._head_layers import Layer, Vector, check_whole, strided_rows
from torch_aclnn_ops.ops._tiling import Sizes, tile_rows

import torch
from torch import Tensor, nn


class Layout(NamedTuple):
    """Sizes, strides and offset of a view of contiguous logits."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class LogitSum:
    """A view of a sum of linear layers' outputs and vectors, optionally bounded by a tanh.

    Args:
        layers: the layers whose outputs are summed.
        vectors: the vectors over the classes that are added.
        bound: if given, the logits are ``bound * tanh(sum)``.
        dtype: the dtype of the logits.
        options: keyword arguments of :func:`torch_aclnn_ops.functional.linear_cross_entropy`.
        layout: the layout of a view; contiguous by default.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        vectors: tuple[Vector, ...],
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

    @property
    def requires_grad(self) -> bool:
        """Whether the logits depend on a tensor that requires a gradient."""
        operands = [one for layer in self.layers for one in (layer.input, layer.weight, layer.bias)]
        operands += [vector.tensor for vector in self.vectors]
        return any(one is not None and one.requires_grad for one in operands)

    def probe(self) -> Tensor:
        """Return a meta tensor with the dtype, shape and strides of the logits."""
        whole = torch.empty(self.whole, dtype=self.dtype, device="meta")
        return whole if self.layout is None else whole.as_strided(*self.layout)

    def viewed(self, view: Tensor, offset: int = 0) -> "LogitSum":
        """Return a view of these logits with the layout of a view of the probe, at an offset relative to the probe."""
        if self.layout is not None:
            offset = self.layout.offset + offset
        layout = Layout(tuple(view.shape), view.stride(), offset)
        return LogitSum(self.layers, self.vectors, self.bound, self.dtype, self.options, layout)

    def contiguous_rows(self, class_dim: int = -1) -> "LogitSum | None":
        """Return the logits contiguous, with the classes last; None if the view does not consist of whole rows."""
        if self.layout is None:
            return self if class_dim in (-1, len(self.whole) - 1) else None
        sizes, strides, offset = list(self.layout.sizes), list(self.layout.strides), self.layout.offset
        if not sizes or sizes.pop(class_dim) != self.classes or strides.pop(class_dim) != 1:
            return None
        if any(number % self.classes for number in (*strides, offset)):
            return None
        row_strides = [stride // self.classes for stride in strides]
        layers = tuple(
            layer.with_input(strided_rows(layer.input, sizes, row_strides, offset // self.classes))
            for layer in self.layers
        )
        return LogitSum(layers, self.vectors, self.bound, self.dtype, self.options)

    def selected(self, mask: Tensor) -> "LogitSum | None":
        """Return the rows that a mask selects, as ``logits[mask]``."""
        rows = self.contiguous_rows()
        if rows is None or mask.dtype != torch.bool or mask.ndim >= len(rows.shape) or torch.compiler.is_compiling():
            return None
        if mask.shape != rows.shape[: mask.ndim] or mask.device != self.device:
            return None
        layers = tuple(layer.with_input(layer.input[mask]) for layer in rows.layers)
        return LogitSum(layers, rows.vectors, rows.bound, rows.dtype, rows.options)

    def _elementwise(self) -> "LogitSum | None":
        """Return the contiguous logits for an elementwise operation; None if its result would not be contiguous."""
        is_contiguous = self.layout is None or torch.empty_like(self.probe()).is_contiguous()
        return self.contiguous_rows() if is_contiguous else None

    def cast(self, dtype: torch.dtype) -> "LogitSum | None":
        """Return the logits in another dtype; the loss is computed without rounding the logits to it."""
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
        vectors = tuple(vector.divided(number) for vector in rows.vectors)
        return LogitSum(layers, vectors, None, rows.dtype, rows.options)

    def tanh(self) -> "LogitSum | None":
        """Return the hyperbolic tangent of the logits, as used by softcapping."""
        rows = self._elementwise()
        if rows is None or rows.bound is not None:
            return None
        return LogitSum(rows.layers, rows.vectors, 1.0, rows.dtype, rows.options)

    def plus(self, other: Any) -> "LogitSum | None":
        """Return the sum with other lazy logits, or with a vector over the classes."""
        rows = self._elementwise()
        if rows is None or rows.bound is not None:
            return None
        of_bias = rows.layers[0].weight.dtype
        if isinstance(other, LogitSum):
            others = other._elementwise()
            if others is None or others.bound is not None or rows.shape != others.shape:
                return None
            # The loss is computed in one autocast state, and in one dtype of class weights.
            layers, vectors = (*rows.layers, *others.layers), (*rows.vectors, *others.vectors)
            if len({(layer.autocast, accumulation_dtype(layer.weight.dtype)) for layer in layers}) > 1:
                return None
        elif (
            is_plain(other)
            and other.numel() == self.classes
            and other.shape[-1:] == (self.classes,)
            and other.ndim <= len(rows.shape)
            and other.is_floating_point()  # integers may be too large for 16 bits
            and torch.promote_types(of_bias, other.dtype) == of_bias
            and other.device == self.device
        ):
            has_no_version = torch.compiler.is_compiling() or other.is_inference()
            version = None if has_no_version else version_of(other)
            layers, vectors = rows.layers, (*rows.vectors, Vector(other, 1.0, version))
        else:
            return None
        return LogitSum(layers, vectors, None, torch.promote_types(rows.dtype, other.dtype), rows.options)

    def cross_entropy(self, target: Any, **options: Any) -> Tensor | None:
        """Compute :func:`torch.nn.functional.cross_entropy` without logits, or return None if it needs them."""
        class_dim = 1 if len(self.shape) > 1 else 0
        rows = self.contiguous_rows(class_dim)
        if rows is None or not isinstance(target, Tensor) or target.device != self.device:
            return None
        if target.shape != rows.shape[:-1] or target.is_floating_point():
            return None  # probabilities, or a mismatch that cross_entropy raises for
        is_float32 = is_autocast_on(target) and self.dtype != torch.float64
        weight = options.get("weight")
        if isinstance(weight, Tensor) and (is_float32 or weight.dtype == self.dtype):  # the dtype of cast logits
            options["weight"] = weight.to(accumulation_dtype(rows.layers[0].weight.dtype))
        with rows.layers[0].saved_autocast():
            loss = rows._flat_cross_entropy(target.reshape(-1), {**self.options, **options})
        loss = loss.to(torch.float32 if is_float32 else self.dtype)
        return loss.reshape(rows.shape[:-1]) if options.get("reduction") == "none" else loss

    def _flat_cross_entropy(self, target: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute the cross entropy of contiguous rows and flattened targets from the layers' inputs and weights."""
        for part in self.layers:
            part.check_versions()
        for vector in self.vectors:
            vector.check_version()
        first, *others = self.layers
        divisor, given = first.divisor, options
        if self.bound is None:
            options = {**given, "temperature": divisor}
        else:
            options = {**given, "softcap": divisor, "temperature": divisor / self.bound}
        added = _total(tuple((one.tensor, one.divisor / divisor) for one in self.vectors))
        if not others:

            def loss_of(input: Tensor, weight: Tensor, bias: "Tensor | None") -> Tensor:  # as Dynamo of torch 2.9 reads
                bias = _total(tuple((one, 1.0) for one in (bias, added) if one is not None))
                return _cross_entropy(input, weight, bias, target, options)

            return first.apply(loss_of)
        for layer in self.layers:
            check_whole(layer.linear, layer.weight)
        is_traced = torch.compiler.is_compiling() or in_functorch_transform()
        is_frozen = not all(layer.weight.requires_grad for layer in self.layers)
        if is_frozen and not is_traced:
            inputs = tuple(layer.input.reshape(-1, layer.input.shape[-1]) for layer in self.layers)
            return _cross_entropy_in_chunks(self._logits_of_rows(), inputs, first.weight, target, **given)
        # The sum of layers is one layer with concatenated features. Adapters have the dtype of a frozen head: otherwise
        # it would be copied to float32, for which CANN has no operators.
        rows, weights, biases = [], [], [] if added is None else [(added, 1.0)]
        for layer in self.layers:
            factor = divisor / layer.divisor
            row = layer.input if factor == 1 else layer.input * factor
            rows.append(row.to(first.input.dtype) if is_frozen else row)
            weights.append(layer.weight.to(first.weight.dtype) if is_frozen else layer.weight)
            if layer.bias is not None:
                biases.append((layer.bias, 1 / factor))
        return _cross_entropy(torch.cat(rows, -1), torch.cat(weights, -1), _total(tuple(biases)), target, options)

    def _logits_of_rows(self) -> Callable[..., Tensor]:
        """Return a function of rows of the layers' inputs that returns their logits."""
        autocast = self.layers[0].autocast  # that of the loss
        weights = [_cast_in_each_call(layer.weight, autocast) for layer in self.layers]
        biases = [layer.bias is not None and _cast_in_each_call(layer.bias, autocast) for layer in self.layers]
        vectors = [(_cast_in_each_call(one.tensor, None), one.divisor) for one in self.vectors]

        def logits_of(*inputs: Tensor) -> Tensor:
            total: Any = _total(tuple((tensor(), divisor) for tensor, divisor in vectors))
            for input, layer, weight, bias in zip(inputs, self.layers, weights, biases, strict=True):
                part = nn.functional.linear(input, weight(), bias() if bias else None)
                part = part if layer.divisor == 1 else part / layer.divisor
                total = part if total is None else part + total
            logits: Tensor = total
            return logits if self.bound is None else torch.tanh(logits) * self.bound

        return logits_of


def _cast_in_each_call(tensor: Tensor, autocast: torch.dtype | None) -> Callable[[], Tensor]:
    """Return a function that returns a tensor in the dtype of its operation.

    A 16-bit tensor is cast from float32 in each call, so that autograd adds the gradients of all chunks in float32.
    """
    if not tensor.requires_grad:
        return lambda: tensor
    wide = widen(tensor)
    dtype = tensor.dtype if autocast is None or tensor.dtype == torch.float64 else autocast
    return lambda: wide.to(dtype)


def _total(vectors: tuple[tuple[Tensor, float], ...]) -> Tensor | None:
    """Return the sum of vectors, each divided by its divisor."""
    total = None
    for vector, divisor in vectors:
        part = vector.reshape(-1) if divisor == 1 else vector.reshape(-1) / divisor
        total = part if total is None else total + part
    return total


def _cross_entropy(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: dict[str, Any]
) -> Tensor:
    bias = None if bias is None else bias.to(weight.dtype)
    loss: Tensor = F.linear_cross_entropy(
        input.reshape(-1, input.shape[-1]), weight, target, linear_bias=bias, **options
    )
    return loss


# Logits, what a softcap makes of them, their float32 copy, and its softmax and gradients.
_COPIES = 6
_BYTES_OF_COPIES = 2**27  # with a quarter of it a step takes a third longer


def _cross_entropy_in_chunks(
    logits_of: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    head: Tensor,
    target: Tensor,
    *,
    chunk_size: Any,
    max_memory: int | None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross entropy of logits chunk by chunk, recomputing those of a chunk for its gradients.

    Unlike ``linear_cross_entropy`` of concatenated layers, it needs neither a copy nor a gradient of a frozen head.
    ``logits_of`` returns the logits of rows of ``inputs``, and the weight of the ``head`` decides the size of a chunk.
    """
    log_call("linear_cross_entropy", Implementation.FALLBACK, lambda: "the head is frozen and has adapters")
    sizes = Sizes(len(target), head.shape[0], head.shape[1], head.dtype, head.is_cpu)
    if chunk_size == "auto":
        chunk_size, max_memory = None, max_memory or max(_BYTES_OF_COPIES, head.nbytes // 2)
    chunks = tile_rows("linear_cross_entropy", sizes, chunk_size, max_memory, _COPIES).chunks()

    def of_rows(target: Tensor, *inputs: Tensor) -> Tensor:
        logits = logits_of(*inputs)
        logits = logits.to(accumulation_dtype(logits.dtype))
        return torch.nn.functional.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )

    losses_of = recomputed(of_rows)
    losses = torch.cat([losses_of(target[rows], *(one[rows] for one in inputs)) for rows in chunks])
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    is_counted = target != ignore_index
    shares = is_counted if weight is None else weight[target.masked_fill(~is_counted, 0)] * is_counted
    return losses.sum() / shares.sum()
