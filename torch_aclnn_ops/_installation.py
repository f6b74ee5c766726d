"""What is installed, what is missing, and what to do about it, for the doctor."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path

from torch_aclnn_ops import _cpu_extension, _extension, _torch_npu
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._torch_compat.public import cpu_capability
from torch_aclnn_ops._version import __version__

import torch

# Versions of torch with the newest torch_npu for each, oldest first; make matrix tests them, and reads this line.
PAIRS = {
    "2.9.1": "2.9.1",
    "2.10.0": "2.10.0.post7",
    "2.11.0": "2.11.0.post3",
    "2.12.0": "2.12.0.post3",
    "2.13.0": "2.13.0",
    "2.14.0": "2.14.0",
}
_BUILD = "torch_aclnn_ops again with pip's --no-build-isolation, in a checkout with --editable too"
ON_THE_HOST_NPU = "python -m host_npu -m torch_aclnn_ops.doctor"

_LIBRARIES = ("numpy", "transformers", "accelerate", "peft", "trl", "lightning")
# Environment variables that affect torch, torch_npu and this package; none of them is a path.
_SETTINGS = re.compile(
    "TORCH_ACLNN_.*|HOST_NPU_.*|TORCH_DEVICE_BACKEND_AUTOLOAD|TASK_QUEUE_ENABLE|PER_STREAM_QUEUE|ASCEND_LAUNCH_BLOCKING"
    "|ASCEND_RT_VISIBLE_DEVICES|ACLNN_CACHE_LIMIT|PYTORCH_NPU_ALLOC_CONF|TORCH_NPU_LAZY_FUSION|OMP_NUM_THREADS"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: The component that was checked.
        found: The result.
        remedy: What to do if the component is missing but needed, or ``None``.
        is_broken: Whether the component is installed but cannot be used as it is.
        is_for_npus: Whether the remedy is omitted on a machine without NPU, torch_npu and CANN.
    """

    what: str
    found: str
    remedy: str | None = None
    is_broken: bool = False
    is_for_npus: bool = False


def findings() -> list[Finding]:
    """Check the components that the package uses on a CPU, an NPU and the host NPU, a simulated NPU on the CPU.

    Returns:
        One finding per component, in dependency order.

    Example:
        >>> findings()[0].what
        'torch_aclnn_ops'
    """
    found = [
        _package(),
        _python(),
        _torch(),
        _other_libraries(),
        _settings(),
        _installed_torch_npu(),
        _cann(),
        _npu(),
        _npu_extension(),
        _host_npu(),
        _cpu_kernels(),
    ]
    if has_npu_or_cann() or _torch_npu.is_installed():
        return found
    return [dataclasses.replace(row, remedy=None) if row.is_for_npus else row for row in found]


def has_npu_or_cann() -> bool:
    """Return whether there is a sign of a real NPU: its device node, or CANN."""
    return any(Path("/dev").glob("davinci*")) or "ASCEND_HOME_PATH" in os.environ or _torch_npu.finds_cann()


def _package() -> Finding:
    is_checkout = Path(__file__).parents[1].joinpath("setup.py").exists()
    found = f"{__version__}, {'from a checkout' if is_checkout else 'installed'}{', disabled' * is_disabled()}"
    return Finding("torch_aclnn_ops", found)


def _python() -> Finding:
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".rstrip(" ,")
    cores = f"{os.cpu_count()} core(s), of which torch uses {torch.get_num_threads()}"
    return Finding("Python", f"{platform.python_version()} on {system}, {cores}")


def _other_libraries() -> Finding:
    versions = []
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return Finding("other libraries", ", ".join(versions) or "none")


def _settings() -> Finding:
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _SETTINGS.fullmatch(name)]
    return Finding("settings", ", ".join(settings) or "none")


def _torch() -> Finding:
    build = "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    return Finding("torch", f"{torch.__version__}, a {build} build, {cpu_capability()}")


def _installed_torch_npu() -> Finding:
    command = how_to_install(torch.__version__)
    if not _torch_npu.is_installed():
        remedy = f"for NPUs, real or simulated: {command}"
        return Finding("torch_npu", "not installed", remedy, is_for_npus=True)
    version = importlib.metadata.version("torch_npu")
    if release(version) != release(torch.__version__):
        return Finding("torch_npu", f"{version}, but torch is {torch.__version__}", command, is_broken=True)
    conflict = _torch_npu.conflict()
    if conflict is not None:
        fault, remedy = conflict.split(". ")
        found = f"{version}; {fault}"
        return Finding("torch_npu", found, f"{remedy}; the host NPU works with it", is_broken=_torch_npu.finds_cann())
    return Finding("torch_npu", version)


def is_simulated() -> bool:
    """Return whether the host NPU simulator is enabled in this process."""
    return os.environ.get("HOST_NPU_ENABLE", "0") not in ("", "0") and _torch_npu.is_imported()


def _cann() -> Finding:
    if is_simulated():
        return Finding("CANN", "simulated, by the host NPU")
    home = os.environ.get("ASCEND_HOME_PATH")
    if _torch_npu.finds_cann():
        where = "its libraries are on the loader's search path" if home is None else home
        return Finding("CANN", f"{_cann_version()}{where}")
    if home is not None:
        found = f"{home}, but not on the loader's search path"
        return Finding("CANN", found, f"source {home}/set_env.sh", is_broken=True)
    return Finding("CANN", "not found", "for real NPUs: install CANN and source its set_env.sh", is_for_npus=True)


def _cann_version() -> str:
    """Return the CANN version that torch_npu reports, followed by a comma, or an empty string."""
    if not _torch_npu.is_imported():
        return ""
    try:
        version = torch.npu.utils.get_cann_version()  # type: ignore[attr-defined]
    except Exception:  # the files it reads differ between CANN versions, and the report must not fail
        return ""
    return f"{version}, " if version else ""


def _npu() -> Finding:
    reason = _torch_npu.why_unavailable()
    if reason is not None and not _torch_npu.is_imported():
        can_simulate = importlib.util.find_spec("host_npu") is not None
        simulate = f"to simulate one: python -m host_npu PROGRAM; to check that: {ON_THE_HOST_NPU}"
        return Finding("NPU", f"none: {reason}", simulate if can_simulate else None)
    count = int(torch.npu.device_count())  # type: ignore[attr-defined]
    if not count:
        found = "none: torch_npu is imported, but it finds no device"
        return Finding("NPU", found, "check npu-smi info", is_broken=True)
    return Finding("NPU", f"{count} device(s), {_extension.soc() or 'unknown chip'}")


def _npu_extension() -> Finding:
    reason = _extension.why_unavailable()
    reinstall = f"install {_BUILD}" if _torch_npu.is_installed() else f"install torch_npu, then {_BUILD}"
    if reason is None:
        return Finding("NPU extension", "loaded")
    if _torch_npu.is_imported():
        return Finding("NPU extension", f"not loaded: {reason}", reinstall, is_broken=True)
    if importlib.util.find_spec("torch_aclnn_ops._C") is None:
        return Finding("NPU extension", "not built", f"for NPUs, real or simulated: {reinstall}", is_for_npus=True)
    return Finding("NPU extension", "built; it is loaded with torch_npu")


def _host_npu() -> Finding:
    try:
        version = importlib.metadata.version("host_npu")
    except importlib.metadata.PackageNotFoundError:
        remedy = "to simulate NPUs: pip install ./host-npu, after torch_npu"
        return Finding("host NPU", "not installed", remedy)
    return Finding("host NPU", f"{version}{', enabled' if is_simulated() else ''}")


def _cpu_kernels() -> Finding:
    reason = _cpu_extension.why_unavailable()
    if reason is None:
        why_not = _cpu_extension.why_no_bfloat16_products()
        products = "with native instructions" if why_not is None else f"in float32, because {why_not}"
        return Finding("CPU kernels", f"bfloat16 products {products}")
    return Finding("CPU kernels", f"not loaded: {reason.partition(';')[0]}", f"for speed: install {_BUILD}")


def release(version: str) -> str:
    """Return a version without the build of torch (``+cpu``) or the later builds of torch_npu (``.post3``)."""
    return version.partition("+")[0].partition(".post")[0]


def how_to_install(torch_version: str) -> str:
    """Return the command that installs a torch_npu for this torch, or a tested pair if there is none for it.

    Args:
        torch_version: ``torch.__version__``.
    """
    installed = release(torch_version)
    if installed in PAIRS:
        return f"pip install torch_npu=={PAIRS[installed]}"
    newest = list(PAIRS)[-1]
    return (
        f"pip install torch=={newest} torch_npu=={PAIRS[newest]}, because torch {torch_version} has no tested torch_npu"
        "; on a machine with an NPU, install the versions for its CANN, see docs/install.md"
    )
