"""Python in another process, with a user's settings instead of the tests'."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_UNSET = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "LD_LIBRARY_PATH", "ASCEND_HOME_PATH")


def run_python(*arguments, path=(), cwd=ROOT, input=None, **settings):
    """Run Python with these arguments, with folders first in the search path, and more settings."""
    kept = {name: value for name, value in os.environ.items() if name not in _UNSET}
    search_path = os.pathsep.join(map(str, [*path, ROOT, *filter(None, sys.path[1:])]))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        input=input,
        env={**kept, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1", **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_code(code, *path, **settings):
    """Run a program with folders first in the search path."""
    return run_python("-c", code, path=path, **settings)


def run_pytest(device, *arguments):
    """Run tests in a process of host_npu.testing; it imports the package, which looks for the chip."""
    import pytest

    os.environ.pop("PYTEST_ADDOPTS", None)
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))
