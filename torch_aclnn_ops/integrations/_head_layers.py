"""The terms of a sum of logits: outputs of linear layers, whose weights may be sharded, and bias vectors."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch_aclnn_ops._autograd.derivatives import in_functorch_transform
from torch_aclnn_ops._tensors import is_autocast_on, is_plain
from torch_aclnn_ops._torch_compat.private import in_ddp_with_static_graph, modules_sharded_with, version_of

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
            return self.apply(nn.functional.linear)

    def apply(self, function: Callable[..., Tensor]) -> Tensor:
        """Return ``function(input, weight, bias)`` of whole weights."""
        linear = self.linear
        if is_parametrized(linear) or is_plain(linear.weight):
            # The tensors of the forward pass, because functional_call and parametrizations replace those of the layer.
            check_whole(linear, self.weight)
            return function(self.input, self.weight, self.bias)
        if modules_sharded_with(linear) > 1:
            raise RuntimeError(
                "fully_shard has sharded the head together with other modules, whose weights are resharded before the"
                " loss: call fully_shard on the head itself, or pass reshard_after_forward=False to this call"
            )

        def of_unsharded(linear: nn.Linear, input: Tensor) -> Tensor:
            check_whole(linear, linear.weight)
            return function(input, linear.weight, linear.bias)

        # FSDP2 shards this layer on its own, and all-gathers its weights in its forward pass.
        result: Tensor = linear(self.input, function=of_unsharded)
        return result

    def check_versions(self) -> None:
        """Raise if input or weights were modified after the forward pass, or if DDP needs the loss in its forward pass.

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


def check_whole(linear: nn.Linear, weight: Tensor) -> None:
    """Raise if a layer's weight is sharded."""
    is_whole = is_plain(weight) and weight.shape == (linear.out_features, linear.in_features)
    has_no_storage = torch.compiler.is_compiling() or in_functorch_transform()
    if is_whole and (has_no_storage or weight.untyped_storage().nbytes() > 0):
        return
    raise RuntimeError(
        "the head's weights are still sharded when the loss or the logits are computed: FSDP1, ZeRO-3 (DeepSpeed), and"
        " fully_shard of a head with adapters (PEFT), or of the model with reshard_after_forward=True, gather them only"
        " during the forward pass of the module that they wrap. Use fully_shard (FSDP2) with the default,"
        " shard such a head together with the rest of the model, or call unpatch_model"
    )
