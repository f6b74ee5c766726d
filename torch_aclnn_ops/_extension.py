"""Load the compiled extension ``torch_aclnn_ops._C``, and know why it is not there where it is not."""

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from torch_aclnn_ops import _torch_npu
from torch_aclnn_ops._built_for import why_unfit
from torch_aclnn_ops._limits import EVERY_CHIP

import torch


class Operator(Protocol):
    """What the extension needs of a raw operator."""

    name: str

    def check(self, args: tuple[Any, ...], values: bool) -> None:
        """Raise where the arguments break the operator's rules."""

    def check_chip(self, args: tuple[Any, ...]) -> None:
        """Raise where the chip lacks the operator."""

    def dispatch(self, *args: Any) -> Any:
        """Call the operator through torch's dispatcher, with all arguments in the order of its schema."""


_module: ModuleType | None = None
_reason: str | None = "it was not loaded yet"
_soc: str | None = None
_missing: dict[str, str] = {}
_operators: dict[str, Operator] = {}
_checks_values = os.environ.get("TORCH_ACLNN_CHECK_VALUES") == "1"

# The extension's own entries of the raw operators, by their names: they take all arguments in the order of the schema.
entries: dict[str, Callable[..., Any]] = {}

# The extension's autograd functions, by their names: makers of entries that leave other calls and dtypes to a fallback.
functions: dict[str, Callable[[Callable[..., Any], Sequence[torch.dtype]], Callable[..., Any]]] = {}


def register(operator: Operator) -> None:
    """Make a raw operator known, before :func:`load`."""
    _operators[operator.name] = operator


def load() -> str | None:
    """Load the extension if torch_npu is imported; return why it is not loaded, or ``None`` if it is.

    Importing this package does it. Who imports torch_npu later calls it again.
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
    _reason = why_unfit(Path(spec.origin), "torch", "torch_npu")
    if _reason is not None:
        return _reason
    try:
        module = importlib.import_module("torch_aclnn_ops._C")
    except ImportError as error:
        _reason = f"it cannot be loaded, and has to be rebuilt: {error}"
        return _reason
    _module, _reason = module, None
    _soc = _family(module.soc_name())
    _missing = {name: reason for name, reason in module.missing_operators().items() if reason}
    module.set_rules(_check, _check_chip)
    module.check_values(_checks_values)
    functions.update(module.functions)
    entries.update((name, make_entry(_operators[name].dispatch)) for name, make_entry in module.entries.items())
    return None


def why_unavailable() -> str | None:
    """Return why the extension is not loaded, or ``None`` if it is."""
    return _reason


def soc() -> str | None:
    """Return the family of the NPU's chip, such as ``"Ascend910B"``; ``None`` if it is not known."""
    return _soc


def why_without(operator_name: str) -> str | None:
    """Return why a raw operator has no kernel for NPUs here, or ``None`` if it has one."""
    if _reason is not None and load() is not None:
        return f"the extension is not loaded: {_reason}"
    return _missing.get(operator_name)


def launches() -> dict[str, int]:
    """Return how often the extension has launched each of CANN's operators in this process.

    Returns:
        Counts by the operators' names in CANN; empty where the extension is not loaded.

    Example:
        >>> isinstance(launches(), dict)
        True
    """
    return {} if _module is None else dict(_module.launches())


def check_queue(function: str) -> None:
    """Raise if torch_npu's task queue has ended: since then torch_npu's operators compute nothing and say nothing."""
    if _module is not None:
        _module.check_queue(function)


def check_values(enabled: bool) -> None:
    """Check values on NPUs too: the range of indices, targets and steps.

    CANN does not check them, and writes to other memory for an index that is out of range. The check waits for the
    device in every call, so it is off unless asked for, here or by ``TORCH_ACLNN_CHECK_VALUES=1``. On a CPU values are
    always checked.
    """
    global _checks_values
    _checks_values = enabled
    if _module is not None:
        _module.check_values(enabled)


def checks_values() -> bool:
    """Return whether checks of values wait for a device to read them."""
    return _checks_values


def _family(name: str | None) -> str | None:
    fitting = [family for family in EVERY_CHIP if name is not None and name.startswith(family)]
    return max(fitting, key=len, default=None)


def _check(operator_name: str, args: tuple[Any, ...], values: bool) -> None:
    """Apply an operator's argument rules; the extension asks when CANN has refused a call."""
    _operators[operator_name].check(args, values)


def _check_chip(operator_name: str, args: tuple[Any, ...]) -> None:
    """Raise where the chip lacks an operator; the extension asks at its first call."""
    _operators[operator_name].check_chip(args)
