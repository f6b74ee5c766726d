"""Import the installed torch_npu with the simulated CANN libraries, whichever module imports it first.

``import torch`` imports torch_npu, and so do accelerate and others. An import hook therefore prepares torch_npu's
library and replaces its kernels, whichever module imports it.
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from host_npu import _cann_home, _exit, _libraries

_LOADER_CACHE = Path("/etc/ld.so.cache")

# torch_npu prints this warning if CANN is not installed, which is expected here.
_NO_CANN = tuple(f"{warning}: ASCEND_HOME_PATH environment variable is not set." for warning in ("Warning", "Warning "))


def is_imported() -> bool:
    """Return whether torch_npu has been imported."""
    return sys.modules.get("torch_npu") is not None


def folder() -> Path | None:
    """Return the folder of the installed torch_npu, or ``None``, without importing it.

    ``python -m`` and ``python -c`` put the working directory first in ``sys.path``, which may be a checkout of
    torch_npu.
    """
    spec = importlib.machinery.PathFinder.find_spec("torch_npu", _installed_paths())
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _installed_paths() -> list[str]:
    """Return ``sys.path`` without the working directory, unless this package is installed there too."""
    here, own = os.stat(os.curdir), os.stat(Path(__file__).parents[1])
    kept = []
    for entry in sys.path:
        try:
            status = os.stat(entry or os.curdir)
        except OSError:
            continue
        if not os.path.samestat(status, here) or os.path.samestat(own, here):
            kept.append(entry)
    return kept


def real_cann() -> str | None:
    """Return how torch_npu would find a real CANN, or ``None``, without loading it."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    if os.path.isdir(home) and not _cann_home.is_own(home):
        return f"ASCEND_HOME_PATH is set to {home}"
    name = "libascendcl.so"
    # An empty entry is the working directory, which does not contain CANN.
    folders = filter(os.path.isabs, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    is_found = any(os.path.exists(os.path.join(folder, name)) for folder in folders)
    with contextlib.suppress(OSError):
        is_found |= re.search(rb"/" + re.escape(name.encode()) + rb"\0", _LOADER_CACHE.read_bytes()) is not None
    return "its libraries are on the loader's search path" if is_found else None


class Importer(importlib.abc.MetaPathFinder):
    """A meta path finder for the installed torch_npu, which prepares its import and completes it afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of torch_npu whose loader loads the simulated CANN first; ``None`` for other modules."""
        if fullname != "torch_npu":
            return None
        spec = self._next(fullname, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_prepared(module: ModuleType) -> None:
                _import_torch_alone()
                _libraries.load_torch_npu(Path(str(spec.origin)).parent)
                with _without_warnings_about_cann():
                    execute(module)
                _libraries.load_aten()
                _exit.wait_for_autograd_at_exit()

            spec.loader.exec_module = execute_prepared  # type: ignore[method-assign]
        return spec

    def _next(self, fullname: str, target: ModuleType | None) -> ModuleSpec | None:
        """Delegate to the following finders, which may have their own hooks."""
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        paths = _installed_paths()
        return next(filter(None, (finder.find_spec(fullname, paths, target) for finder in others)), None)


def _import_torch_alone() -> None:
    """Import torch, whose libraries torch_npu's library needs, but not torch_npu, whose import is already running."""
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        import torch  # noqa: F401, PLC0415
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def _without_warnings_about_cann() -> Iterator[None]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    for line in printed.getvalue().splitlines():
        if line not in _NO_CANN:
            print(line)
