"""Load the compiled part ``torch_aclnn_ops._cpu``, and know what it gives on this chip, and why not more."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_aclnn_ops._built_for import why_unfit
from torch_aclnn_ops._torch_compat.modes import assume_constant_result, disable_current_modes
from torch_aclnn_ops._torch_compat.public import cpu_capability

import torch

# The autograd functions by their names, as makers of entries that leave other calls and dtypes to a fallback.
_functions: dict[str, Callable[[Callable[..., Any], Sequence[torch.dtype]], Callable[..., Any]]] = {}
_vectors = ""


def describe() -> str:
    """Say in a few words what the compiled part gives on this chip; it has to be available."""
    reason = why_no_bfloat16_products()
    products = "on the chip's units" if reason is None else f"in float32, because {reason}"
    return f"{vectors()} row kernels, bfloat16 products {products}"


def vectors() -> str:
    """Return the instructions of the row kernels, ``NEON`` or torch's word; the compiled part has to be available."""
    assert why_unavailable() is None
    return _vectors


@functools.cache
def why_unavailable() -> str | None:
    """Load the compiled part at the first call; return why it is not used, or ``None`` if it is."""
    global _vectors
    spec = importlib.util.find_spec("torch_aclnn_ops._cpu")
    if spec is None or spec.origin is None or spec.loader is None:
        return "it was not built"
    reason = why_unfit(Path(spec.origin), "torch")
    if reason is not None:
        return reason
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _vectors = module.vectors
    except (AttributeError, ImportError) as error:
        return f"it cannot be loaded, and has to be rebuilt: {error}"
    _functions.update(module.functions)
    return None


def function(name: str, fallback: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> Callable[..., Any]:
    """Make an entry of an autograd function, which leaves other calls and dtypes to ``fallback``; or return that."""
    if why_unavailable() is not None:
        return fallback
    return _functions[name](fallback, dtypes)


@functools.cache
def why_no_bfloat16_products() -> str | None:
    """Return why bfloat16 products are not made by the compiled part, or ``None`` if they are."""
    if (reason := why_unavailable()) is not None:
        return reason
    if not has_bfloat16_units():
        return "the CPU has no units for bfloat16"
    return _why_refused()


@assume_constant_result
def has_bfloat16_units() -> bool:
    """Return whether the CPU has units for bfloat16 products, and torch uses them."""
    if cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):  # asked for by ATEN_CPU_CAPABILITY, maybe
        return False
    return not {"avx512_bf16", "amx_tile"}.isdisjoint(_flags_of_cpu())


@functools.cache
def _flags_of_cpu() -> frozenset[str]:
    """Return what Linux says that the first CPU has."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())
    except OSError:
        return frozenset()


def _why_refused() -> str | None:
    """Multiply whole numbers, of which every sum is exact; more than a tile of rows, classes and features."""
    rows, classes, features = 259, 131, 526
    with disable_current_modes():
        numbers = torch.arange((rows + classes) * features, device="cpu").remainder(7) - 3
        input, weight = numbers.view(-1, features).bfloat16().split((rows, classes))
        logits = torch.empty(rows, classes, dtype=torch.float32, device="cpu")
        try:
            torch.ops.torch_aclnn_ops.linear_cross_entropy_logits(input, weight, logits)
        except RuntimeError as error:
            return f"oneDNN refuses them: {str(error).splitlines()[0]}"
        is_right = torch.equal(logits, input.float() @ weight.float().T)
    return None if is_right else "oneDNN's are not right on this CPU"
