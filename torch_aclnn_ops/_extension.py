"""Load the compiled extension ``torch_aclnn_ops._C``, or say why not."""

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_aclnn_ops import _torch_npu
from torch_aclnn_ops._built_for import incompatibility

import torch

# Chip families are prefixes of chip names; the longest matching prefix applies.
EVERY_CHIP = ("Ascend910", "Ascend910B", "Ascend910_93", "Ascend310P", "Ascend950")

_module: ModuleType | None = None
_reason: str | None = "it has not been loaded yet"
_soc: str | None = None
_missing: dict[str, str] = {}
_operators: dict[str, Any] = {}  # RawOperator, whose module imports this one
_checks_values = os.environ.get("TORCH_ACLNN_CHECK_VALUES") == "1"

# Direct entry points of the raw operators, by name; they take all arguments in schema order. The one for lists takes
# lists of the tensors.
entries: dict[str, Callable[..., Any]] = {}

# Factories of the C++ autograd functions, by name: given a fallback and dtypes, they return an entry point.
functions: dict[str, Callable[[Callable[..., Any], Sequence[torch.dtype]], Callable[..., Any]]] = {}


def register(operator: Any) -> None:
    """Register a raw operator; call it before :func:`load`."""
    _operators[operator.name] = operator


def load() -> str | None:
    """Load the extension if torch_npu is imported; return why it is not loaded, or ``None`` if it is.

    Importing this package calls it. Call it again after importing torch_npu later.
    """
    global _module, _reason, _soc, _missing
    if _module is not None:
        return None
    if not _torch_npu.is_imported():
        _reason = _torch_npu.why_unavailable() or "torch_npu is not imported"
        return _reason
    spec = importlib.util.find_spec("torch_aclnn_ops._C")
    if spec is None or spec.origin is None:
        _reason = "it was not built: reinstall with pip's --no-build-isolation where torch_npu is installed"
        return _reason
    _reason = incompatibility(Path(spec.origin), "torch", "torch_npu")
    if _reason is not None:
        return _reason
    try:
        module = importlib.import_module("torch_aclnn_ops._C")
    except ImportError as error:
        _reason = f"it cannot be loaded and must be rebuilt: {error}"
        return _reason
    _module, _reason = module, None
    name = module.soc_name()
    _soc = max((one for one in EVERY_CHIP if name is not None and name.startswith(one)), key=len, default=None)
    _missing = {name: reason for name, reason in module.missing_operators().items() if reason}
    # Applied after CANN has rejected a call, and on the first launch.
    module.set_rules(
        lambda name, args, values: _operators[name].check(args, values),
        lambda name, args: _operators[name].check_chip(args),
    )
    module.check_values(_checks_values)
    functions.update(module.functions)
    entries.update((name, make_entry(_operators[name].dispatch)) for name, make_entry in module.entries.items())
    entries["apply_fused_ema_adam_list"] = module.apply_fused_ema_adam_list
    return None


def why_unavailable() -> str | None:
    """Return why the extension is not loaded, or ``None`` if it is."""
    return _reason


def soc() -> str | None:
    """Return the chip family of the NPU, such as ``"Ascend910B"``; ``None`` if it is unknown."""
    return _soc


def why_without(operator_name: str) -> str | None:
    """Return why a raw operator has no NPU kernel in this process, or ``None`` if it has one."""
    if _reason is not None and load() is not None:
        return f"the extension is not loaded: {_reason}"
    return _missing.get(operator_name)


def launches() -> dict[str, int]:
    """Return how often the extension has launched each CANN operator in this process.

    Returns:
        Counts by CANN operator name; empty if the extension is not loaded.

    Example:
        >>> isinstance(launches(), dict)
        True
    """
    return {} if _module is None else dict(_module.launches())


def check_queue(function: str) -> None:
    """Raise if torch_npu's task queue has stopped: from then on its operators silently compute nothing.

    In compiled code there is no check.
    """
    if not torch.compiler.is_compiling() and _module is not None:
        _module.check_queue(function)


def check_values(enabled: bool) -> None:
    """Enable or disable value checks on NPUs: the range of indices, targets and steps.

    CANN does not check these values: for an index out of range, it accesses memory out of bounds. The checks
    synchronize with the device in every call, so they are disabled by default; ``TORCH_ACLNN_CHECK_VALUES=1`` enables
    them too. On the CPU, values are always checked. In code that is compiled by ``torch.compile``, a class out of range
    makes the loss NaN instead, on every device.
    """
    global _checks_values
    if not isinstance(enabled, bool):
        raise TypeError(f"check_values: enabled must be a bool, but it is {enabled!r}")
    _checks_values = enabled
    if _module is not None:
        _module.check_values(enabled)


def checks_values() -> bool:
    """Return whether values are checked on NPUs."""
    return _checks_values
