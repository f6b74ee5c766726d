"""Import torch and, if CANN is available, torch_npu.

torch automatically imports torch_npu if it is installed, and torch_npu cannot be loaded without CANN's libraries, so
that even ``import torch`` fails. This module looks for CANN first, and hides a torch_npu that cannot be loaded from
torch and from other packages.
"""

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

# The libraries that libtorch_npu.so is linked with, in dependency order.
_CANN_LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
)

# CANN's numbers of ND, NCHW, NHWC, NCDHW and NCL, whose elements are where the strides say.
_BASE_FORMATS = (2, 0, 1, 30, 47)

# If both torch's CUDA library and torch_npu call this torch function (since 2.10), they register the same settings,
# and the second registration aborts the process.
_SETTINGS = b"26AcceleratorAllocatorConfig14getMutableKeys"


def why_unavailable() -> str | None:
    """Return why NPUs are unavailable in this process, or ``None`` if torch_npu is imported."""
    return None if is_imported() else _reason


def is_installed() -> bool:
    """Return whether torch_npu is installed, whether or not it can be loaded."""
    if "torch_npu" in sys.modules:
        # None is set by this module, and by other code that hides torch_npu.
        return _is_hidden or sys.modules["torch_npu"] is not None
    return _find("torch_npu") is not None


def is_imported() -> bool:
    """Return whether torch_npu is imported."""
    return sys.modules.get("torch_npu") is not None


def has_private_format(tensor: Any) -> bool:
    """Return whether a tensor is on an NPU in a format such as FRACTAL_NZ; the extension has the same function."""
    return tensor.device.type == "npu" and sys.modules["torch_npu"].get_npu_format(tensor) not in _BASE_FORMATS


def finds_cann() -> bool:
    """Return whether CANN's libraries are loaded, or are where its ``set_env.sh`` says, without loading them."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    library = _CANN_LIBRARIES[0]
    return _is_loaded(library) or any(os.path.exists(os.path.join(folder, library)) for folder in folders)


def conflict() -> str | None:
    """Return why importing torch_npu would abort the process with the installed torch, or ``None`` if it would not.

    Neither package is imported. If CANN's libraries are already loaded, for instance by a simulator, there is no
    conflict.
    """
    if not is_installed() or is_imported() or _is_loaded(_CANN_LIBRARIES[0]):
        return None
    if not all(registers_settings(path) for path in (_library("torch", "libc10_cuda.so"), library())):
        return None
    return (
        "the installed torch is a CUDA build, with which importing torch_npu aborts the process. "
        "To use NPUs, install the CPU build of the same torch version instead"
    )


def library() -> Path:
    """Return the path of libtorch_npu.so as installed by the torch_npu wheel."""
    return _library("torch_npu", "libtorch_npu.so")


def _library(package: str, name: str) -> Path:
    return Path(_find(package) or "").parent / "lib" / name


def _find(package: str) -> str | None:
    """Return the file that a package is imported from, even if the package is hidden."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    return None if spec is None else spec.origin  # a folder without a source has none


def registers_settings(path: Path) -> bool:
    """Return whether a library registers allocator settings with torch."""
    if not path.exists():
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_SETTINGS) >= 0


def call_after_import(function: Callable[[], object]) -> None:
    """Call a function after the first import of torch_npu, which a CANN simulator may import after this package."""
    if not is_imported():
        sys.meta_path.insert(0, _Importer(function))


class _Importer(importlib.abc.MetaPathFinder):
    """A meta path finder that delegates the import of torch_npu to the other finders and then calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch_npu":
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._function()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _hide() -> None:
    """Make imports of torch_npu fail as if it were not installed.

    transformers, accelerate, peft and Lightning import torch_npu whenever it is installed, and would fail to import.
    """
    global _is_hidden
    _is_hidden = True
    sys.modules["torch_npu"] = None  # type: ignore[assignment]


def _why_not_loadable() -> str | None:
    if not is_installed():
        return "torch_npu is not installed"
    for library in _CANN_LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError as error:
            return f"torch_npu is installed, but CANN is not: {error}"
    return None


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _autoload(value: str | None) -> Iterator[None]:
    """Temporarily set whether torch loads backends automatically; ``None`` leaves the setting unchanged."""
    previous = os.environ.get(_AUTOLOAD)
    try:
        if value is not None:
            os.environ[_AUTOLOAD] = value
        yield
    finally:
        if previous is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = previous


def _import_torch() -> str | None:
    """Import torch, and torch_npu unless it cannot be loaded or is disabled; return why torch_npu is not imported."""
    if is_imported():
        return None
    # If autoloading is disabled, do not load CANN's libraries: a simulator may load its own.
    if os.environ.get(_AUTOLOAD) == "0" and is_installed() and finds_cann():
        reason: str | None = f"torch_npu is installed and CANN found, but {_AUTOLOAD}=0 disables loading torch_npu"
    else:
        reason = _why_not_loadable()
        if reason is None and (reason := conflict()) is not None:
            warnings.warn(f"torch_aclnn_ops: {reason}.", RuntimeWarning, stacklevel=2)
        if reason is not None and is_installed():
            _hide()
    with _autoload(None if reason is None else "0"):
        import torch  # noqa: F401
    if reason is None and not is_imported():
        return "torch was imported without torch_npu before torch_aclnn_ops; import torch_npu first to use an NPU"
    return reason


def _notice_fork() -> None:
    """Make torch_npu raise in a forked process, where it would wait for threads that do not exist.

    On its own torch_npu detects only processes started by multiprocessing.
    """
    notice = getattr(getattr(sys.modules.get("torch_npu"), "npu", None), "_after_fork", None)
    if notice is not None:
        notice(None)


_is_hidden = False
_reason = _import_torch()
os.register_at_fork(after_in_child=_notice_fork)
