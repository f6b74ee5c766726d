"""Load the compiled extension ``torch_aclnn_ops._cpu``, and report what it supports on this CPU."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

from torch_aclnn_ops._built_for import incompatibility
from torch_aclnn_ops._torch_compat.private import assume_constant_result, disable_current_modes
from torch_aclnn_ops._torch_compat.public import cpu_capability

import torch
from torch import Tensor

# Factories of the C++ autograd functions, by name: given a fallback and dtypes, they return an entry point.
_functions: dict[str, Callable[[Callable[..., Any], Sequence[torch.dtype]], Callable[..., Any]]] = {}
_HELPERS = ("few_logits", "have_grads", "holds", "placement")
_helpers: dict[str, Callable[..., Any]] = {}


@functools.cache
def why_unavailable() -> str | None:
    """Load the extension on the first call; return why it is not used, or ``None`` if it is."""
    spec = importlib.util.find_spec("torch_aclnn_ops._cpu")
    if spec is None or spec.origin is None or spec.loader is None:
        return "it was not built"
    reason = incompatibility(Path(spec.origin), "torch")
    if reason is not None:
        return reason
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _helpers.update({name: getattr(module, name) for name in _HELPERS})
    except (AttributeError, ImportError) as error:
        return f"it cannot be loaded and must be rebuilt: {error}"
    _functions.update(module.functions)
    return None


def function(name: str, fallback: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> Callable[..., Any]:
    """Return the entry point of an autograd function, which calls ``fallback`` for unsupported arguments."""
    if why_unavailable() is not None:
        return fallback
    return _functions[name](fallback, dtypes)


def placement(tensors: list[Tensor]) -> object:
    """Return a value that stays equal while tensors keep address, dtype, shape and strides; none may be a subclass.

    With the extension, which takes a tenth of the time, it is a 64-bit hash, otherwise a list of these properties.
    """
    if why_unavailable() is None:
        return _helpers["placement"](tensors)
    return [[one.data_ptr(), one.dtype, one.shape, one.stride()] for one in tensors]


def contents(containers: list[Any]) -> list[Any]:
    """Return the objects in lists, tuples and dicts, in order; each key of a dict comes before its value."""
    items = (chain.from_iterable(one.items()) if isinstance(one, dict) else one for one in containers)
    return list(chain.from_iterable(items))


def holds(containers: list[Any], objects: list[Any]) -> bool:
    """Return whether the :func:`contents` of containers are these objects; compared by identity."""
    if why_unavailable() is None:
        return bool(_helpers["holds"](containers, objects))
    found = contents(containers)
    return len(found) == len(objects) and all(map(is_, found, objects))


def have_grads(tensors: list[Tensor], grads: list[Tensor]) -> bool:
    """Return whether tensors have exactly these gradient objects; none of the tensors may be a subclass."""
    if why_unavailable() is None:
        return bool(_helpers["have_grads"](tensors, grads))
    return len(tensors) == len(grads) and all(map(is_, map(attrgetter("grad"), tensors), grads))


def few_logits(*arguments: Any) -> Tensor | None:
    """Return the loss of a call of ``linear_cross_entropy`` that csrc/cpu/few_logits.h supports, or ``None``."""
    return _helpers["few_logits"](*arguments) if why_unavailable() is None else None


@functools.cache
def why_no_bfloat16_products() -> str | None:
    """Return why the extension does not compute bfloat16 products, or ``None`` if it does."""
    if (reason := why_unavailable()) is not None:
        return reason
    if not has_bfloat16_units():
        return "the CPU has no fast bfloat16 instructions"
    return _why_products_fail()


@assume_constant_result
def has_bfloat16_units() -> bool:
    """Return whether the CPU has bfloat16 matrix instructions faster than those of float32, and PyTorch uses them.

    Intel's AVX512-BF16 instructions are not: without AMX, oneDNN's bfloat16 products took 1.9 times as long as MKL's of
    float32.
    """
    if cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):  # possibly set by ATEN_CPU_CAPABILITY
        return False
    cpu = _first_cpu()
    flags = cpu.get("flags", "").split()
    return "amx_tile" in flags or ("avx512_bf16" in flags and cpu.get("vendor_id") != "GenuineIntel")


@functools.cache
def _first_cpu() -> dict[str, str]:
    """Return what ``/proc/cpuinfo`` says of the first CPU."""
    try:
        with open("/proc/cpuinfo") as cpus:
            parts = [line.partition(":") for line in cpus.read().partition("\n\n")[0].splitlines()]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in parts}


def _why_products_fail() -> str | None:
    """Test a product of integers, whose sums are exact, larger than one tile in every dimension."""
    rows, classes, features = 259, 131, 526
    with disable_current_modes():
        numbers = torch.arange((rows + classes) * features, device="cpu").remainder(7) - 3
        input, weight = numbers.view(-1, features).bfloat16().split((rows, classes))
        logits = torch.empty(rows, classes, dtype=torch.float32, device="cpu")
        try:
            torch.ops.torch_aclnn_ops.linear_cross_entropy_logits(input, weight, logits)
        except RuntimeError as error:
            return f"oneDNN does not support them: {str(error).splitlines()[0]}"
        is_right = torch.equal(logits, input.float() @ weight.float().T)
    return None if is_right else "oneDNN computes wrong results on this CPU"
