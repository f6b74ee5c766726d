"""The simulated CANN libraries: their location, the versions they were compiled for, and loading."""

import ctypes
import importlib.metadata
import json
import re
from pathlib import Path

# In dependency order.
_CANN = (
    "ascendcl",
    "hccl",
    "hcomm",
    "ge_runner",
    "graph",
    "acl_op_compiler",
    "acl_tdt_channel",
    "nnopbase",
    "opapi",
    "mspti",
)
# Loads torch_npu.
_LOADER = "host_npu_loader"
# Loaded after torch_npu, whose kernels it replaces.
_ATEN = "host_npu_aten"
# Computed with torch: the functions that libopapi refuses, and ATB, which torch_npu looks up by file name.
_FORMULAS = "host_npu_formulas"
_ATB = "atb"

# Counted and failed like CANN's functions, but not one of them: enqueues a task on a stream.
_NOT_EXPORTED = ("host_npu::enqueue",)

# Functions without a status, which return nothing or only a value. AclSet... are aliases of aclSet....
_WITHOUT_STATUS = re.compile(
    r"""
    ReleaseHugeMem | UnInitHugeMemThreadLocal | CanUsePTACache | \w*PTA\w*HashKey | \w*PTACacheThreadLocal
    | PTA\w+ExecCache | AddTensorAddrToCachedList | aclDestroyTensorDesc | aclopDestroyAttr | aclSetTensorDescName
    | aclGetDataBuffer\w+ | aclGetTensorDesc(Type|Format|NumDims) | aclGetCompileoptSize | aclAppLog
    | aclGetRecentErrMsg | AclSet\w+ | aclrt(Get|PeekAt)LastError | Msprof\w+ | aclprof\w+ | host_npu_\w+
    | HcclGet(ErrorString|CommConfigCapability)
    """,
    re.VERBOSE,
)

FOLDER = Path(__file__).resolve().parent / "_lib"
# The versions that the libraries were compiled for, written by csrc/build.py.
_VERSIONS = FOLDER / "versions.json"

# From this release, torch_npu registers settings that torch's CUDA library also registers, which aborts the process.
_REGISTERS_SETTINGS = (2, 10)


def _path(name: str) -> Path:
    return FOLDER / f"lib{name}.so"


def names() -> list[str]:
    """Return the names of all libraries."""
    return [*_CANN, _LOADER, _FORMULAS, _ATB, _ATEN]


def missing() -> list[str]:
    """Return the libraries that are missing."""
    return [path.name for path in (*map(_path, names()), _VERSIONS) if not path.exists()]


def incompatibility() -> str | None:
    """Return why the libraries are incompatible with the installed torch and torch_npu, or ``None``."""
    built: dict[str, str] = json.loads(_VERSIONS.read_text())
    installed = versions()
    if built == installed:
        return None
    return f"it was compiled for {_listed(built)}, but {_listed(installed)} are installed"


def versions() -> dict[str, str]:
    """Return the releases of torch and torch_npu without local versions: CPU and CUDA builds are compatible."""
    return {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "torch_npu")}


def _listed(releases: dict[str, str]) -> str:
    return " and ".join(f"{name} {release}" for name, release in releases.items())


def load_cann() -> ctypes.CDLL:
    """Load the libraries under CANN's names, so that torch_npu finds them, and return the runtime."""
    loaded = [ctypes.CDLL(str(_path(name)), ctypes.RTLD_GLOBAL) for name in _CANN]
    runtime = loaded[0]
    runtime.host_npu_stats_json.restype = ctypes.c_char_p
    runtime.host_npu_reset.restype = None
    runtime.host_npu_count_calls.restype = None
    runtime.host_npu_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p]
    runtime.host_npu_fail.restype = ctypes.c_bool
    return runtime


class _Symbol(ctypes.Structure):
    """``Dl_info``, the result of ``dladdr`` for an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def has(function: str) -> bool:
    """Return whether a simulated CANN library defines this function, and not a library that it is linked with."""
    try:
        address = ctypes.cast(ctypes.CDLL(None)[function], ctypes.c_void_p)
    except (AttributeError, ValueError):
        return function in _NOT_EXPORTED
    symbol = _Symbol()
    found = ctypes.CDLL(None).dladdr(address, ctypes.byref(symbol))
    return bool(found) and Path(symbol.file.decode()).parent == FOLDER


def can_fail(function: str) -> bool:
    """Return whether a function has a status that :func:`host_npu.fail` can change."""
    return _WITHOUT_STATUS.fullmatch(function) is None


def answers() -> dict[str, str]:
    """Return the implementation of each aclnn function that torch_npu looks up.

    It is ``"checks"``, ``"rules"`` (a formula with CANN's documented rules), ``"formula"`` or ``"refused"``.
    """
    listed = ctypes.CDLL(str(_path("opapi"))).host_npu_list
    listed.restype = ctypes.c_char_p
    return dict(line.split() for line in listed().decode().splitlines())


def graph_operators() -> list[str]:
    """Return the names of the simulated graph operators (aclop)."""
    listed = ctypes.CDLL(str(_path("acl_op_compiler"))).host_npu_list_graph_operators
    listed.restype = ctypes.c_char_p
    names: list[str] = listed().decode().splitlines()
    return names


def load_torch_npu(folder: Path) -> None:
    """Load what torch_npu's import needs: ATB, and libtorch_npu.so with the workaround for CUDA builds of torch.

    CANN's and torch's libraries must be loaded first.
    """
    ctypes.CDLL(str(_path(_ATB)), ctypes.RTLD_GLOBAL)
    # The package torch_npu 2.9 cannot be imported once its library is loaded.
    if tuple(map(int, versions()["torch_npu"].split(".")[:2])) < _REGISTERS_SETTINGS:
        return
    library = folder / "lib" / "libtorch_npu.so"
    load = ctypes.CDLL(str(_path(_LOADER))).host_npu_load_torch_npu
    load.restype = ctypes.c_char_p
    error = load(str(library).encode())
    if error is not None:
        raise OSError(error.decode())


def load_aten() -> None:
    """Register CPU fallbacks for operators that are not simulated; torch_npu must be imported."""
    import torch

    torch.ops.load_library(_path(_FORMULAS))
    torch.ops.load_library(_path(_ATEN))
