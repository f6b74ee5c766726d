"""The terms of a sum of logits, outputs of linear layers and bias vectors, and their loss if the head is frozen."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch_aclnn_ops._autograd.derivatives import in_functorch_transform, recomputed
from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._tensors import accumulation_dtype, is_autocast_on, is_plain
from torch_aclnn_ops._torch_compat.private import in_ddp_with_static_graph, modules_sharded_with, version_of
from torch_aclnn_ops.ops._tiling import LOGITS_BYTES, Sizes, tile_rows

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class Layer(NamedTuple):
    """The output of a linear layer divided by ``divisor``, with weights, their state and autocast dtype of the call."""

    input: Tensor
    linear: nn.Linear
    weight: Tensor
    bias: Tensor | None
    versions: tuple[int, ...] | None
    autocast: torch.dtype | None
    in_static_graph: bool = False  # of DistributedDataParallel
    divisor: float = 1.0

    def output(self) -> Tensor:
        """Return the layer's output, without the division."""
        self.check_versions()
        with self.saved_autocast():
            if not is_plain(self.weight_now()):
                return with_weights(self.linear, self.input, nn.Linear.forward)
            # The tensors of the forward pass, because functional_call and parametrizations replace those of the layer.
            check_whole(self.linear, self.weight)
            return nn.functional.linear(self.input, self.weight, self.bias)

    def weight_now(self) -> Tensor:
        """Return the weight that the layer has, or had in the call if a parametrization computes it at each read."""
        return self.weight if is_parametrized(self.linear) else self.linear.weight

    def check_versions(self) -> None:
        """Raise if the input or the weights were modified after the forward pass, or it is DDP's that needs the loss.

        In compiled code there is no check.
        """
        if torch.compiler.is_compiling():
            return
        if self.versions is not None and versions(self.input, self.weight, self.bias) != self.versions:
            raise _changed("the head's weights or its input")
        # DDP would not average the gradients: it looks for the tensors that its forward pass returns.
        if self.in_static_graph and not in_ddp_with_static_graph():
            raise RuntimeError(
                "with DistributedDataParallel(static_graph=True) the loss of a patched model must be computed in the"
                " forward pass: pass labels to the model, static_graph=False, or call unpatch_model"
            )

    def saved_autocast(self) -> AbstractContextManager[None]:
        """Return a context manager that restores the autocast state of the layer's call."""
        is_on = self.autocast is not None
        if is_autocast_on(self.input) == is_on:
            return nullcontext()
        return torch.autocast(self.input.device.type, self.autocast, enabled=is_on)

    def divided(self, number: float) -> "Layer":
        """Return the layer with its output divided by ``number``."""
        return Layer(*self[:-1], self.divisor * number)  # Dynamo of 2.9 cannot return the result of _replace

    def with_input(self, input: Tensor) -> "Layer":
        """Return the layer with rows of its input."""
        self.check_versions()
        read = None if self.versions is None else (version_of(input), *self.versions[1:])
        _, linear, weight, bias, _, autocast, in_static_graph, divisor = self
        return Layer(input, linear, weight, bias, read, autocast, in_static_graph, divisor)


def versions(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return the version counters of tensors."""
    return tuple(version_of(tensor) for tensor in tensors if tensor is not None)


def is_parametrized(linear: nn.Linear) -> bool:
    """Return whether reading the layer's weight computes it, which may update buffers or draw random numbers."""
    return parametrize.is_parametrized(linear, "weight")


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"the logits of this forward pass can no longer be computed, because {what} changed since; use the model's"
        " logits, and compute their loss, before that"
    )


class Vector(NamedTuple):
    """A vector over the classes that is added to the logits, divided by ``divisor``."""

    tensor: Tensor
    divisor: float
    version: int | None

    def divided(self, number: float) -> "Vector":
        """Return the vector divided by ``number``."""
        return Vector(self.tensor, self.divisor * number, self.version)

    def check_version(self) -> None:
        """Raise if the vector was modified after it was added."""
        if torch.compiler.is_compiling():
            return
        if self.version is not None and version_of(self.tensor) != self.version:
            raise _changed("a tensor that was added to them")


def strided_rows(input: Tensor, sizes: list[int], row_strides: list[int], offset: int) -> Tensor:
    """Return rows of a layer's input, selected by sizes, strides and offset in rows."""
    features = input.shape[-1]
    count = 1
    contiguous: list[int] = []
    for size in reversed(sizes):
        contiguous.insert(0, count)
        count *= size
    if count == input.shape[:-1].numel() and offset == 0 and row_strides == contiguous:
        return input.reshape(*sizes, features)
    strides = [stride * features for stride in row_strides]
    # as_strided takes an offset into the storage; Dynamo does not support storage_offset.
    is_compiling = torch.compiler.is_compiling()
    flat = input.clone(memory_format=torch.contiguous_format) if is_compiling else input.contiguous()
    first = 0 if is_compiling else flat.storage_offset()
    return flat.view(-1).as_strided((*sizes, features), (*strides, 1), first + offset * features)


def with_weights(linear: nn.Linear, input: Tensor, function: Callable[[nn.Linear, Tensor], Tensor]) -> Tensor:
    """Call ``function(linear, input)`` while the weights are unsharded."""

    def checked(linear: nn.Linear, input: Tensor) -> Tensor:
        check_whole(linear, linear.weight)
        return function(linear, input)

    if is_plain(linear.weight):
        return checked(linear, input)
    if modules_sharded_with(linear) > 1:
        raise RuntimeError(
            "fully_shard has sharded the head together with other modules, whose weights are resharded before the loss:"
            " call fully_shard on the head itself, or pass reshard_after_forward=False to this call"
        )
    # FSDP2 shards this layer on its own, and all-gathers its weights in its forward pass.
    result: Tensor = linear(input, function=checked)
    return result


def check_whole(linear: nn.Linear, weight: Tensor) -> None:
    """Raise if a weight is sharded."""
    is_whole = is_plain(weight) and weight.shape == (linear.out_features, linear.in_features)
    has_no_storage = torch.compiler.is_compiling() or in_functorch_transform()
    if is_whole and (has_no_storage or weight.untyped_storage().nbytes() > 0):
        return
    raise RuntimeError(
        "the head's weights are still sharded when the loss is computed: FSDP1, ZeRO-3 (DeepSpeed), and fully_shard of"
        " a head with adapters (PEFT) gather them only during the forward pass of the module that they wrap. Use"
        " fully_shard (FSDP2), shard such a head together with the rest of the model, or call unpatch_model"
    )


# Logits, what a softcap makes of them, their float32 copy, and its softmax and gradients.
_COPIES = 6


def cross_entropy_in_chunks(
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

    Args:
        logits_of: returns the logits of rows of ``inputs``.
        inputs: the inputs of the head and of its adapters, whose first dimension is the rows.
        head: the head's weight, for the size of the chunks.
        target: class indices.
        chunk_size: rows of a chunk, or ``"auto"``.
        max_memory: bytes of a chunk, instead.
        weight: as of :func:`torch.nn.functional.cross_entropy`, like the other options.
        ignore_index: a target that is ignored.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        label_smoothing: the share of the uniform distribution.
    """
    log_call("linear_cross_entropy", Implementation.FALLBACK, lambda: "the head is frozen and has adapters")
    sizes = Sizes(len(target), head.shape[0], head.shape[1], head.dtype, head.is_cpu)
    if chunk_size == "auto":
        chunk_size, max_memory = None, max_memory or max(LOGITS_BYTES, head.nbytes // 2)
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
