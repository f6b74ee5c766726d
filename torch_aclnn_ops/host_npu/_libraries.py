"""The simulated CANN libraries: finding them, loading them, and what they answer."""

import ctypes
import os
from pathlib import Path

from torch_aclnn_ops import _built_for, _torch_npu

# In the order in which they need one another.
_CANN = ("ascendcl", "hccl", "hcomm", "ge_runner", "graph", "acl_op_compiler", "acl_tdt_channel", "nnopbase", "opapi")
# It loads torch_npu.
_LOADER = "host_npu_loader"
# It is loaded after torch_npu, whose kernels it replaces.
_ATEN = "host_npu_aten"

_FOLDER = Path(__file__).resolve().parents[1] / "_host_npu"


def _path(name: str) -> Path:
    return _FOLDER / f"lib{name}.so"


def names() -> list[str]:
    """Return the names of all libraries."""
    return [*_CANN, _LOADER, _ATEN]


def missing() -> list[str]:
    """Return the files of libraries that were not built."""
    return [_path(name).name for name in names() if not _path(name).exists()]


def why_unfit() -> str | None:
    """Return why the libraries do not fit the installed torch and torch_npu, or ``None``; all were built together."""
    return _built_for.why_unfit(_path(_ATEN), "torch", "torch_npu")


def real_cann() -> str | None:
    """Return what shows that the process would find a real CANN, or ``None``."""
    home = os.environ.get("ASCEND_HOME_PATH")
    if home:
        return f"ASCEND_HOME_PATH is set to {home}"
    return "its libraries are where the loader searches" if _torch_npu.finds_cann() else None


def load_cann() -> ctypes.CDLL:
    """Load the libraries under CANN's names, where torch_npu finds them, and return the runtime."""
    loaded = [ctypes.CDLL(str(_path(name)), ctypes.RTLD_GLOBAL) for name in _CANN]
    runtime = loaded[0]
    runtime.host_npu_stats_json.restype = ctypes.c_char_p
    runtime.host_npu_reset.restype = None
    runtime.host_npu_count_calls.restype = None
    runtime.host_npu_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p]
    runtime.host_npu_fail.restype = None
    return runtime


def load_torch_npu() -> None:
    """Load the library of torch_npu where a CUDA build of torch could keep it from it; CANN's have to be loaded."""
    library = _torch_npu.library()
    # The package torch_npu 2.9 cannot be imported after its library, which registers nothing that torch has.
    if not _torch_npu.registers_settings(library):
        return
    load = ctypes.CDLL(str(_path(_LOADER))).host_npu_load_torch_npu
    load.restype = ctypes.c_char_p
    error = load(str(library).encode())
    if error is not None:
        raise OSError(error.decode())


def load_aten() -> None:
    """Let the CPU compute what the simulated operators do not; torch_npu has to be imported."""
    import torch

    torch.ops.load_library(_path(_ATEN))
