"""The host NPU, a simulated Ascend NPU on the CPU: programs for the device ``npu`` run on any Linux machine.

The CANN libraries that torch_npu needs are simulated on the host, so that an unmodified torch_npu sees devices. Their
memory faults on host access, and their streams are asynchronous. Operators are computed on the CPU.

``python -m host_npu train.py`` runs a program with it, :func:`enable` does the same inside one. Child processes, such
as those of ``torch.multiprocessing.spawn``, also have host NPUs.
"""

import ctypes
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host_npu import _cann_home, _inductor, _libraries, _operators, _torch_npu, _torchair
from host_npu._version import __version__

__all__ = [
    "SOCS",
    "HostNpuError",
    "Stats",
    "__version__",
    "count_calls",
    "enable",
    "fail",
    "is_enabled",
    "reset",
    "stats",
]


def __dir__() -> list[str]:
    return __all__


SOCS = ("Ascend910", "Ascend910B", "Ascend910_93", "Ascend310P", "Ascend950")

_DEVICES = "HOST_NPU_DEVICES"
_SOC = "HOST_NPU_SOC"
_STRICT_MEMORY = "HOST_NPU_STRICT_MEMORY"
# Whether dtypes that CANN does not document are refused.
_DTYPES = "HOST_NPU_DTYPES"
_MOST_DEVICES = 64
_DEFAULT_DEVICES = "1"
_DEFAULT_SOC = "Ascend910B"

# Makes child processes enable the host NPU; enable(force=True) sets it to "force".
_ENABLE = "HOST_NPU_ENABLE"
# Contains a sitecustomize.py, which enables the host NPU in child processes before their program starts.
_CHILDREN = str(Path(__file__).resolve().parent / "_children")
# 0 prevents torch from importing torch_npu automatically.
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

# Environment variables that lead torch_npu to a real CANN.
_REAL_CANN = ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_CUSTOM_OPP_PATH", "ASCEND_AICPU_PATH")

# Longer than the sleep of torch_npu's thread, see csrc/ascendcl/wake_ups.h. In a program whose other threads compute,
# the live objects may never settle.
_SECONDS_BETWEEN_READS = 0.0015
_MOST_READS = 20

_runtime: ctypes.CDLL | None = None


class HostNpuError(RuntimeError):
    """Raised with the reason if the host NPU cannot be used."""


@dataclass(frozen=True)
class Stats:
    """The counters of the host NPU; names missing in a counter have a count of 0.

    Attributes:
        alive: Live objects by kind: ``"aclTensor"``, ``"aclOpExecutor"``,
            ``"aclrtStream"``, ``"aclrtEvent"`` and others.
        calls: Calls of each function that can fail, since :func:`count_calls`.
        collectives: Calls of each function that communicates between ranks since the last :func:`reset`, by name, for
            example ``"HcclAllReduce"``.
        collective_bytes: Bytes of this process's data that other ranks read in those calls, by function. Data that
            several ranks read counts once; data that a rank reads of its own does not count.
        launches: Launches of the second phase of each operator since the last :func:`reset`, by name.
        device_bytes: Bytes allocated on each device. torch_npu caches freed memory.
        peak_device_bytes: The largest ``device_bytes`` since the last :func:`reset`.
        pending_failures: Failures of :func:`fail` that have not occurred yet, by function.
    """

    alive: Counter[str]
    calls: Counter[str]
    collectives: Counter[str]
    collective_bytes: Counter[str]
    launches: Counter[str]
    device_bytes: Counter[int]
    peak_device_bytes: Counter[int]
    pending_failures: Counter[str]


def is_enabled() -> bool:
    """Return whether the NPUs of this process are simulated.

    Example:
        >>> is_enabled() in (True, False)
        True
    """
    return _runtime is not None


def enable(
    devices: int | None = None, soc: str | None = None, force: bool = False, strict_memory: bool | None = None
) -> None:
    """Simulate the NPUs of this process, and import torch_npu.

    Tensors can be on device ``"npu"`` afterwards. Enabling it twice has no effect. Child processes are enabled too, by
    environment variables.

    Args:
        devices: Number of devices; by default that in the environment variable ``HOST_NPU_DEVICES``, or 1.
        soc: The chip, one of :data:`SOCS`, which determines what operators accept; by default that in the environment
            variable ``HOST_NPU_SOC``, or ``"Ascend910B"``.
        force: Hide a real CANN from this process. Without it, a machine that has CANN raises an error.
        strict_memory: Allocate exactly the requested size, to find reads and writes a few bytes beyond it.
            Otherwise, sizes are as on a device: rounded up to 32 bytes, plus 32. By default, true if the environment
            variable ``HOST_NPU_STRICT_MEMORY`` is 1.

    Raises:
        HostNpuError: torch_npu is imported already, is not installed, or finds a real CANN; the libraries were not
            built; the host NPU is enabled with other settings.
        TypeError: ``devices`` is not an integer, ``soc`` not a string, or ``strict_memory`` not a bool.
        ValueError: ``devices``, ``soc``, or the environment variable of an argument has an invalid value.

    Example:
        >>> import host_npu
        >>> host_npu.enable(devices=2)  # doctest: +SKIP
        >>> torch.ones(3, device="npu:1").sum().item()  # doctest: +SKIP
        3.0
    """
    global _runtime
    settings = _settings(devices, soc, strict_memory)
    if _runtime is not None:
        for name, value in settings.items():
            if os.environ[name] != value:
                raise HostNpuError(
                    f"the host NPU is enabled with {name}={os.environ[name]}, and cannot be changed to {value}: start"
                    f" the program with {name}={value}, or enable the host NPU once"
                )
    else:
        _prepare(settings, force)
    import torch  # noqa: F401, PLC0415
    import torch_npu  # type: ignore[import-untyped]  # noqa: F401


def _prepare(settings: dict[str, str], force: bool) -> None:
    """Load the simulated libraries, so that torch_npu can be imported, in this process and in its children."""
    global _runtime
    installed = _check_can_enable(force)
    os.environ.update(settings)
    for name in _REAL_CANN:
        os.environ.pop(name, None)
    os.environ.update(_cann_home.variables(installed))
    os.environ[_ENABLE] = "force" if force else "1"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _CHILDREN not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([_CHILDREN, *filter(None, paths)])
    _runtime = _libraries.load_cann()
    sys.meta_path[:0] = [_torch_npu.Importer(), _inductor.TritonFinder(), _inductor.Importer(), _torchair.Importer()]
    # None in sys.modules hides a module from imports; torch_aclnn_ops sets it for torch_npu.
    if "torch_npu" in sys.modules and not _torch_npu.is_imported():
        del sys.modules["torch_npu"]
    os.environ.pop(_AUTOLOAD, None)


def _enable_as_told() -> None:
    """Enable the host NPU in a child process as its environment specifies; importing torch then imports torch_npu."""
    value = os.environ[_ENABLE]
    if value not in ("1", "force"):
        raise ValueError(f"{_ENABLE} must be 0, 1 or force, got {value!r}")
    _prepare(_settings(None, None, None), force=value == "force")


def _settings(devices: int | None, soc: str | None, strict_memory: bool | None) -> dict[str, str]:
    """Return the environment variables of the simulation; arguments take precedence over variables that are set."""
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int)):
        raise TypeError(f"devices must be a whole number from 1 to {_MOST_DEVICES}, got {devices!r}")
    if soc is not None and not isinstance(soc, str):
        raise TypeError(f"soc must be one of {', '.join(SOCS)}, got {soc!r}")
    if strict_memory is not None and not isinstance(strict_memory, bool):
        raise TypeError(f"strict_memory must be True or False, got {strict_memory!r}")
    count = os.environ.get(_DEVICES, _DEFAULT_DEVICES) if devices is None else str(devices)
    if not (count.isascii() and count.isdigit() and 1 <= int(count) <= _MOST_DEVICES):
        name = _DEVICES if devices is None else "devices"
        shown = repr(count) if devices is None else count
        raise ValueError(f"{name} must be a whole number from 1 to {_MOST_DEVICES}, got {shown}")
    chip = os.environ.get(_SOC, _DEFAULT_SOC) if soc is None else soc
    if chip not in SOCS:
        raise ValueError(f"{_SOC if soc is None else 'soc'} must be one of {', '.join(SOCS)}, got {chip!r}")
    strict = os.environ.get(_STRICT_MEMORY, "0") if strict_memory is None else str(int(strict_memory))
    if strict not in ("0", "1"):
        raise ValueError(f"{_STRICT_MEMORY} must be 0 or 1, got {strict!r}")
    dtypes = os.environ.get(_DTYPES, "cann")
    if dtypes not in ("cann", "torch"):
        raise ValueError(f"{_DTYPES} must be cann or torch, got {dtypes!r}")
    return {_DEVICES: count, _SOC: chip, _STRICT_MEMORY: strict}


def _check_can_enable(force: bool) -> Path:
    """Return the folder of the installed torch_npu."""
    if _torch_npu.is_imported():
        raise HostNpuError(
            "torch_npu is imported already: enable the host NPU before; if a real CANN is installed, torch imports"
            " torch_npu unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"
        )
    installed = _torch_npu.folder()
    if installed is None:
        raise HostNpuError(
            "the host NPU needs torch_npu, which is not installed: install it with pip, in the same version as torch"
        )
    missing = _libraries.missing()
    if missing:
        raise HostNpuError(
            f"the host NPU in {Path(__file__).parent} was not built ({', '.join(missing)} missing): run pip install"
            " ./host-npu in the checkout, after installing torch and torch_npu; if it is installed already, leave the"
            " folder host-npu, whose sources Python finds first"
        )
    reason = _libraries.incompatibility()
    if reason is not None:
        raise HostNpuError(f"the host NPU cannot be loaded: {reason}; run pip install ./host-npu in the checkout again")
    real = None if force else _torch_npu.real_cann()
    if real is not None:
        raise HostNpuError(f"there is a real CANN ({real}): use its NPU, or hide it by --force or enable(force=True)")
    return installed


def _require_enabled() -> ctypes.CDLL:
    if _runtime is None:
        raise HostNpuError("the host NPU is not enabled: call host_npu.enable() first")
    return _runtime


def stats() -> Stats:
    """Return the counters of the host NPU.

    Work that is still queued is not counted yet: call ``torch.npu.synchronize()`` before. The call takes some
    milliseconds, in which torch_npu frees what its queue has done.

    Raises:
        HostNpuError: The host NPU is not enabled.

    Example:
        >>> torch.npu.synchronize()  # doctest: +SKIP
        >>> host_npu.stats().launches["aclnnMseLossBackward"]  # doctest: +SKIP
        1
    """
    counted = _settled_counts(_require_enabled())
    for name in ("device_bytes", "peak_device_bytes"):
        counted[name] = {int(device): count for device, count in counted[name].items()}
    return Stats(**{name: Counter(counts) for name, counts in counted.items()})


def _settled_counts(runtime: ctypes.CDLL) -> dict[str, Any]:
    """Return the counters once live objects stay the same: a thread of torch_npu, which often sleeps, frees them."""
    counted: dict[str, Any] = json.loads(runtime.host_npu_stats_json())
    for _ in range(_MOST_READS):
        time.sleep(_SECONDS_BETWEEN_READS)
        last, counted = counted, json.loads(runtime.host_npu_stats_json())
        if counted["alive"] == last["alive"]:
            break
    return counted


def reset() -> None:
    """Reset the counters and cancel injected failures, for instance before a test.

    This sets ``launches``, ``calls``, ``collectives`` and ``collective_bytes`` of :func:`stats` to 0 and
    ``peak_device_bytes`` to ``device_bytes``. It stops counting calls, cancels failures of :func:`fail` that have not
    occurred yet, and clears the last error of CANN in this thread. Tensors, device memory and other live
    objects stay. A task queue of torch_npu that has ended stays ended.

    Raises:
        HostNpuError: The host NPU is not enabled.

    Example:
        >>> host_npu.reset()  # doctest: +SKIP
        >>> host_npu.stats().launches  # doctest: +SKIP
        Counter()
    """
    _require_enabled().host_npu_reset()


def count_calls() -> None:
    """Count the calls of every function that :func:`fail` supports, until the next :func:`reset`.

    Raises:
        HostNpuError: The host NPU is not enabled.

    Example:
        >>> host_npu.count_calls()  # doctest: +SKIP
        >>> torch.ones(3, device="npu").cpu()  # doctest: +SKIP
        >>> host_npu.stats().calls["aclrtMemcpy"]  # doctest: +SKIP
        1
    """
    _require_enabled().host_npu_count_calls()


def fail(function: str, nth: int = 1, status: int = 500001, message: str = "failure injected by a test") -> None:
    """Make the n-th call of a CANN function from now on fail, once, to test error handling.

    Every call of this function counts, from any thread and for any tensors. Several failures can be injected. To see
    which functions a program calls, and how often, use :func:`count_calls`.

    torch_npu launches operators from a queue, which a failed launch (the second phase, ``"aclnnMseLossBackward"``)
    stops for good, as on a device: what is queued after that never runs. Every later call that computes or reads
    raises this error. The first phase (``"aclnnMseLossBackwardGetWorkspaceSize"``) fails in the caller and leaves the
    queue as it was, unless torch_npu queues it too (``TASK_QUEUE_ENABLE=2``); with ``TASK_QUEUE_ENABLE=0`` there is no
    queue to stop.

    Args:
        function: A function of the simulated libraries, such as ``"aclnnMseLossBackwardGetWorkspaceSize"`` or
            ``"aclrtMallocAlign32"``, with which torch_npu allocates device memory. For an operator that the host NPU
            refuses, phase one can fail with another status.
        nth: Which call from now on; 1 is the next.
        status: What the function returns.
        message: The message that ``aclGetRecentErrMsg`` then returns.

    Raises:
        HostNpuError: The host NPU is not enabled.
        TypeError: An argument has the wrong type.
        ValueError: CANN has no such ``function``, or it is never called or cannot fail; ``nth`` is below 1, or that
            call is already to fail; or ``status`` is 0, which would be success.

    Example:
        >>> host_npu.fail("aclnnMseLossBackwardGetWorkspaceSize", status=161002)  # doctest: +SKIP

        If an allocation fails, torch_npu frees its cache and tries again, so two failures cause an out-of-memory error:

        >>> for nth in (1, 2):
        ...     host_npu.fail("aclrtMallocAlign32", nth, status=207001)  # doctest: +SKIP
    """
    runtime = _require_enabled()
    if not isinstance(function, str):
        raise TypeError(f"function must be a name, got {function!r}")
    if not _libraries.has(function):
        raise ValueError(
            f"function must be one of CANN's, such as aclnnRmsNormGetWorkspaceSize, got {function!r}; "
            "count_calls() finds those that a program calls"
        )
    if not _libraries.can_fail(function):
        raise ValueError(f"{function} has no status, and so it cannot fail")
    if _operators.is_refused(function):
        raise ValueError(
            f"the host NPU refuses {function} in phase one, so phase two is never called: fail"
            f" {function}GetWorkspaceSize instead"
        )
    for name, value, kind in (("nth", nth, int), ("status", status, int), ("message", message, str)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r}")
    if nth < 1:
        raise ValueError(f"nth must be at least 1, got {nth}")
    if status == 0:
        raise ValueError("status must not be 0, which is success")
    if not runtime.host_npu_fail(function.encode(), nth, status, message.encode()):
        raise ValueError(f"call {nth} of {function} from now on is already to fail: pass another nth")
