"""Checks of the options that PyTorch's function lacks."""

from collections.abc import Collection

from torch_aclnn_ops._head_options import check_memory, check_number
from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyOptions
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput
from torch_aclnn_ops.ops._head.tiling import LogitOptions

import torch

_OUTPUTS = LinearCrossEntropyOutput._fields[1:]
_OUTPUTS_OF_INDICES = ("log_probabilities", "token_accuracy")
_NO_OUTPUTS: frozenset[str] = frozenset()


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
    rows, max_memory = check_memory(
        "linear_cross_entropy", chunk_size, max_memory, None if options is None else options.batch_chunk_size
    )
    softcap = None if softcap is None else check_number("linear_cross_entropy", "softcap", softcap)
    return LogitOptions(softcap, check_number("linear_cross_entropy", "temperature", temperature), rows, max_memory)


def check_options(options: object) -> None:
    """Raise unless ``options`` is ``None`` or PyTorch's options class."""
    if options is not None and LinearCrossEntropyOptions is None:
        raise TypeError(
            f"linear_cross_entropy: options={options!r} requires torch 2.13 or newer, but torch is"
            f" {torch.__version__}; pass chunk_size instead"
        )
    if options is not None and not isinstance(options, LinearCrossEntropyOptions):
        raise TypeError(
            f"linear_cross_entropy: options must be None or a LinearCrossEntropyOptions, but it is {options!r}"
        )


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
