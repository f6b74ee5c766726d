"""The linear layers and vectors that logits are a sum of, as they were in the forward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch_aclnn_ops._autograd.derivatives import in_functorch_transform
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
    bias: Tensor | None
    versions: tuple[int, ...] | None
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
                check_whole(self.linear, self.linear.weight)
                return nn.functional.linear(input, *weights)
            return with_weights(self.linear, input, nn.Linear.forward)

    def check_versions(self) -> None:
        """Raise if the outputs would not be those of the forward pass."""
        if self.versions is not None and versions(self.input, self.weight, self.bias) != self.versions:
            raise _changed("the head's weights or its input")

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
        read = None if self.versions is None else (version_of(input), *self.versions[1:])
        return Layer(input, self.linear, self.weight, self.bias, read, self.autocast, self.divisor)


def versions(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return how often tensors were written to."""
    return tuple(version_of(tensor) for tensor in tensors if tensor is not None)


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"the logits of this forward pass cannot be computed any more, because {what} changed since; use the model's"
        " logits, and compute their loss, before that"
    )


class Vector(NamedTuple):
    """A number for each class that is added to the logits, divided by a number; with its version."""

    tensor: Tensor
    divisor: float
    version: int | None

    def divided(self, number: float) -> "Vector":
        """Return the vector with another divisor."""
        return Vector(self.tensor, self.divisor * number, self.version)

    def check_version(self) -> None:
        """Raise if the vector is not the one that was added."""
        if self.version is not None and version_of(self.tensor) != self.version:
            raise _changed("a tensor that was added to them")


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
    # as_strided counts from the beginning of the storage; Dynamo does not know where in it a tensor begins.
    is_compiling = torch.compiler.is_compiling()
    flat = input.clone(memory_format=torch.contiguous_format) if is_compiling else input.contiguous()
    first = 0 if is_compiling else flat.storage_offset()
    return flat.view(-1).as_strided((*sizes, features), (*strides, 1), first + offset * features)


def with_weights(linear: nn.Linear, input: Tensor, function: Callable[[nn.Linear, Tensor], Tensor]) -> Tensor:
    """Call a function of a layer where its weights are whole."""

    def checked(linear: nn.Linear, input: Tensor) -> Tensor:
        check_whole(linear, linear.weight)
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


def check_whole(linear: nn.Linear, weight: Tensor) -> None:
    is_whole = is_plain(weight) and weight.shape == (linear.out_features, linear.in_features)
    has_no_storage = torch.compiler.is_compiling() or in_functorch_transform()
    if is_whole and (has_no_storage or weight.untyped_storage().nbytes() > 0):
        return
    raise RuntimeError(
        "the head's weights are not whole where the loss is computed: FSDP1 and ZeRO-3 (DeepSpeed) show them only in"
        " the forward pass of the module that they wrap. Use fully_shard (FSDP2), shard the head with the whole model,"
        " or call unpatch_model"
    )
