"""Import torch and, where it can work, torch_npu.

torch imports torch_npu by itself when it is installed, and torch_npu cannot be loaded without CANN's libraries; then
even ``import torch`` fails. This module looks for CANN first, and keeps torch, and packages that import torch_npu
wherever it is installed, from loading one that cannot work.
"""

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import mmap
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

# What libtorch_npu.so is linked with, in the order in which CANN's libraries need one another.
_CANN_LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
)

_LOADER_CACHE = Path("/etc/ld.so.cache")

# Where both torch's part for CUDA and torch_npu call this function of torch's, they register the same settings, and the
# second one ends the process. The versions before 2.12 do not.
_SETTINGS = b"26AcceleratorAllocatorConfig14getMutableKeys"


def why_unavailable() -> str | None:
    """Return why tensors cannot be on an NPU in this process, or ``None`` if torch_npu is imported."""
    return None if is_imported() else _reason


def is_installed() -> bool:
    """Return whether torch_npu is installed, whether or not it can be loaded."""
    if "torch_npu" in sys.modules:
        # None is written there by this module, and by others who want torch_npu not to be found.
        return _is_hidden or sys.modules["torch_npu"] is not None
    return _find("torch_npu") is not None


def is_imported() -> bool:
    """Return whether torch_npu is imported."""
    return sys.modules.get("torch_npu") is not None


def finds_cann() -> bool:
    """Return whether the process would find CANN's libraries, without loading them."""
    return _find_library(_CANN_LIBRARIES[0]) is not None


def conflict() -> str | None:
    """Return why torch_npu ends the process when it is imported with the installed torch, or ``None`` if it does not.

    Neither package is imported to find out. Who has loaded CANN's libraries before, such as a simulator, is expected to
    know what torch_npu needs.
    """
    if not is_installed() or is_imported() or _is_loaded(_CANN_LIBRARIES[0]):
        return None
    if not all(registers_settings(path) for path in (_library("torch", "libc10_cuda.so"), library())):
        return None
    return (
        "the installed torch is a CUDA build, with which torch_npu ends the process when it is imported. "
        "To use NPUs, install the CPU build of the same version of torch in its place"
    )


def library() -> Path:
    """Return where torch_npu's library is, if it is installed as its wheels are."""
    return _library("torch_npu", "libtorch_npu.so")


def _library(package: str, name: str) -> Path:
    return Path(_find(package) or "").parent / "lib" / name


def _find(package: str) -> str | None:
    """Return the file that an installed package is imported from, also of one that is hidden."""
    installed = [entry for entry in sys.path if not _is_only_at_hand(entry)]
    spec = importlib.machinery.PathFinder.find_spec(package, installed)
    return None if spec is None else spec.origin  # a folder without a source has none


def _is_only_at_hand(entry: str) -> bool:
    """Return whether an entry of ``sys.path`` is the working directory, and not where packages are installed.

    ``python -m`` and ``python -c`` put it first. This package is installed where others are.
    """
    here = os.stat(os.curdir)
    try:
        is_here = os.path.samestat(os.stat(entry or os.curdir), here)
    except OSError:
        return False
    return is_here and not os.path.samestat(os.stat(Path(__file__).parents[1]), here)


@contextlib.contextmanager
def _installed_packages_only() -> Iterator[None]:
    """Keep imports from taking a package from the working directory, such as a checkout of torch_npu."""
    removed = [(index, entry) for index, entry in enumerate(sys.path) if _is_only_at_hand(entry)]
    for _, entry in removed:
        sys.path.remove(entry)
    try:
        yield
    finally:
        for index, entry in removed:
            sys.path.insert(index, entry)


def registers_settings(path: Path) -> bool:
    """Return whether a library registers settings of an allocator in the one set of keys that torch has of them."""
    if not path.exists():
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_SETTINGS) >= 0


def call_after_import(function: Callable[[], object]) -> None:
    """Call a function once torch_npu has been imported: a simulator of CANN imports it after this package."""
    if not is_imported():
        sys.meta_path.insert(0, _Importer(function))


class _Importer(importlib.abc.MetaPathFinder):
    """Lets Python, or the hooks of others, import torch_npu, and then calls a function."""

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
    """Make Python say that torch_npu is not installed.

    transformers, accelerate, peft and Lightning import torch_npu wherever they find it, and could not be imported.
    """
    global _is_hidden
    _is_hidden = True
    sys.modules["torch_npu"] = None  # type: ignore[assignment]


def _why_not_loadable() -> str | None:
    if not is_installed():
        return "torch_npu is not installed"
    for library in _CANN_LIBRARIES:
        try:
            _load(library)
        except OSError as error:
            return f"torch_npu is installed, but CANN is not: {error}"
    return None


def _load(library: str) -> None:
    """Load a library of CANN unless it is loaded, as those of a simulator are."""
    if not _is_loaded(library):
        path = _find_library(library)
        if path is None:
            raise OSError(f"{library}: cannot open shared object file: No such file or directory")
        ctypes.CDLL(path)


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _find_library(name: str) -> str | None:
    """Return where the loader finds a library, but for the working directory.

    The loader searches it for every empty entry of LD_LIBRARY_PATH, such as the one that ``$LD_LIBRARY_PATH:/opt/lib``
    has where the variable was not set before.
    """
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        path = os.path.join(folder, name)
        if os.path.isabs(folder) and os.path.exists(path):
            return path
    try:
        found = re.search(rb"(/[^\0]*/" + re.escape(name.encode()) + rb")\0", _LOADER_CACHE.read_bytes())
    except OSError:
        return None
    return None if found is None else os.fsdecode(found[1])


@contextlib.contextmanager
def _autoload(value: str | None) -> Iterator[None]:
    """Say for a while whether torch loads backends by itself; ``None`` leaves it as it is."""
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
    """Import torch, and torch_npu unless it cannot be loaded or is switched off; return why it is not imported."""
    if is_imported():
        return None
    # What is switched off must not be loaded to find out: a simulated CANN may be to take its place.
    if os.environ.get(_AUTOLOAD) == "0" and is_installed() and finds_cann():
        reason: str | None = (
            f"torch_npu is installed and CANN found, but {_AUTOLOAD}=0 keeps torch_npu from being loaded"
        )
    else:
        reason = _why_not_loadable()
        if reason is None and (reason := conflict()) is not None:
            warnings.warn(f"torch_aclnn_ops: {reason}.", RuntimeWarning, stacklevel=2)
        if reason is not None and is_installed():
            _hide()
    with _autoload(None if reason is None else "0"), _installed_packages_only():
        import torch  # noqa: F401
    if reason is None and not is_imported():
        return "torch was imported without torch_npu before torch_aclnn_ops; import torch_npu first to use an NPU"
    return reason


def _notice_fork() -> None:
    """Let torch_npu refuse to work in a forked process, where it would wait for threads that are not there.

    By itself it notices only the processes of multiprocessing.
    """
    notice = getattr(getattr(sys.modules.get("torch_npu"), "npu", None), "_after_fork", None)
    if notice is not None:
        notice(None)


_is_hidden = False
_reason = _import_torch()
os.register_at_fork(after_in_child=_notice_fork)
