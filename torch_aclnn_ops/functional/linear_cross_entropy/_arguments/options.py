"""Checks of the options that PyTorch's function lacks."""

import math
from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any

from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyOptions
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput
from torch_aclnn_ops.ops.linear_cross_entropy.tiling import LogitOptions

import torch
from torch import Tensor

_OUTPUTS = LinearCrossEntropyOutput._fields[1:]
_OUTPUTS_OF_INDICES = ("log_probabilities", "token_accuracy")
_NO_OUTPUTS: frozenset[str] = frozenset()
_AT_LEAST_1 = ("at least 1", lambda number: number >= 1)
_REAL = (float, Real)  # isinstance finds float faster
_POSITIVE = ("positive and finite", lambda number: 0 < number < math.inf)
_NUMBERS: dict[str, tuple[Any, str, str, Callable[[Any], bool]]] = {
    "chunk_size": (Integral, '"auto" or an int', *_AT_LEAST_1),
    "max_memory": (Integral, "None or an int", *_AT_LEAST_1),
    "softcap": (_REAL, "None or a number", *_POSITIVE),
    "temperature": (_REAL, "a number", *_POSITIVE),
    "lse_square_scale": (_REAL, "a number", "at least 0 and finite", lambda number: 0 <= number < math.inf),
}


def check_logit_options(
    softcap: float | None,
    temperature: float,
    chunk_size: int | str,
    max_memory: int | None,
    options: "LinearCrossEntropyOptions | None",
) -> LogitOptions:
    """Check the options of the logits and their chunks."""
    if softcap is None and type(temperature) is float and temperature == 1 and chunk_size == "auto":
        if max_memory is None and options is None:
            return LogitOptions(None, 1.0, None, None)  # Dynamo of 2.9 does not treat defaults as constants
    check_options(options)
    if chunk_size == "auto":
        rows = None if options is None else options.batch_chunk_size
    else:
        rows = check_number("chunk_size", chunk_size)
    if max_memory is not None:
        if rows is not None:
            raise ValueError(
                "linear_cross_entropy: chunk_size and max_memory must not both be given, but they are"
                f" {rows} and {max_memory}"
            )
        max_memory = check_number("max_memory", max_memory)
    softcap = None if softcap is None else check_number("softcap", softcap)
    return LogitOptions(softcap, check_number("temperature", temperature), rows, max_memory)


def check_options(options: object) -> None:
    """Raise unless ``options`` is ``None`` or PyTorch's options class."""
    if options is not None and LinearCrossEntropyOptions is None:
        raise TypeError(
            "linear_cross_entropy: options must be None before torch 2.13, which added LinearCrossEntropyOptions; torch"
            f" is {torch.__version__}, but it is {options!r}; pass chunk_size"
        )
    if options is not None and not isinstance(options, LinearCrossEntropyOptions):
        raise TypeError(
            f"linear_cross_entropy: options must be None or a LinearCrossEntropyOptions, but it is {options!r}"
        )


def check_number(name: str, value: Any) -> Any:
    """Check type and range of a numeric option, which may be a numpy scalar, and return it as a Python number."""
    kind, accepted, accepted_range, fits = _NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"linear_cross_entropy: {name} must be {accepted}, but it is {value!r}")
    if not fits(value):
        raise ValueError(f"linear_cross_entropy: {name} must be {accepted_range}, but it is {value}")
    return int(value) if kind is Integral else float(value)


def check_outputs(outputs: Collection[str]) -> frozenset[str]:
    """Check the names of requested outputs."""
    if outputs == ():
        return _NO_OUTPUTS
    if isinstance(outputs, str) or not isinstance(outputs, Collection):
        raise TypeError(f"linear_cross_entropy: outputs must be a tuple of names, but it is {outputs!r}")
    for name in outputs:
        if name not in _OUTPUTS:
            raise ValueError(f"linear_cross_entropy: outputs must be among {', '.join(_OUTPUTS)}, but one is {name!r}")
    return frozenset(outputs)


def check_outputs_of_probabilities(outputs: Collection[str]) -> None:
    """Raise for outputs that are undefined for probability targets."""
    for name in _OUTPUTS_OF_INDICES:
        if name in outputs:
            raise ValueError(
                f"linear_cross_entropy: outputs must not have {name} with probabilities as target, because it needs"
                " class indices"
            )


def check_token_weight(token_weight: object, target_shape: tuple[int, ...], input: Tensor) -> None:
    """Raise unless ``token_weight`` is a floating-point tensor with one weight per row."""
    if not isinstance(token_weight, Tensor):
        raise TypeError(f"linear_cross_entropy: token_weight must be a Tensor or None, but it is {token_weight!r}")
    if not token_weight.is_floating_point():
        raise TypeError(
            f"linear_cross_entropy: token_weight must have a floating-point dtype, but it has {token_weight.dtype}"
        )
    if token_weight.shape != target_shape:
        raise ValueError(
            f"linear_cross_entropy: token_weight must have the shape of class indices, {list(target_shape)}, but its"
            f" shape is {list(token_weight.shape)}"
        )
    if token_weight.device != input.device:
        raise RuntimeError(
            f"linear_cross_entropy: token_weight must be on {input.device}, as input is, but it is on"
            f" {token_weight.device}"
        )
