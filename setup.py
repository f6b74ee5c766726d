"""Build torch_aclnn_ops; all other settings are in pyproject.toml.

A part is compiled if its requirements are installed; otherwise it is skipped, with a line that says so:

* ``torch_aclnn_ops._C`` (csrc/npu), the NPU extension, needs torch and torch_npu: ``TORCH_ACLNN_NPU=0`` leaves it out,
  ``1`` fails without them;
* ``torch_aclnn_ops._cpu`` (csrc/cpu), faster losses and optimizer, needs torch: ``TORCH_ACLNN_CPU`` is its switch.

``TORCH_ACLNN_INSTRUMENT`` compiles them with sanitizers (``address`` or other values of ``-fsanitize=``),
``TORCH_ACLNN_WERROR=1`` turns compiler warnings into errors. None needs CANN, and torch_npu is not imported. The
compiled parts are reported on stderr, which pip shows with ``-v``.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

# torch would import torch_npu, which cannot be loaded without CANN.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
INSTRUMENT = os.environ.get("TORCH_ACLNN_INSTRUMENT", "")
# For this project's own checks: newer compilers may have further warnings.
WERROR = ["-Werror"] if os.environ.get("TORCH_ACLNN_WERROR") == "1" else []

# The extensions, their descriptions and their compile times.
PARTS = {
    "torch_aclnn_ops._C": ("the NPU extension", "about a minute"),
    "torch_aclnn_ops._cpu": ("the CPU kernels", "about a minute"),
}


def say(line: str) -> None:
    """Print a line on stderr, which pip shows with -v."""
    print(f"torch_aclnn_ops: {line}", file=sys.stderr, flush=True)


def package_folder(name: str) -> Path | None:
    """Find an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def is_wanted(switch: str, what: str, packages: tuple[str, ...] = ("torch", "torch_npu")) -> bool:
    """Return whether to compile a part: as its switch says, or by default if its requirements are installed."""
    choice = os.environ.get(switch, "")
    if choice not in ("", "0", "1"):
        sys.exit(f"torch_aclnn_ops: {switch} must be 0, 1 or empty, but it is {choice!r}")
    missing = [name for name in packages if package_folder(name) is None]
    if choice == "0":
        reason = f"{switch}=0"
    elif missing:
        reason = f"no {' and no '.join(missing)} (pip sees what is installed with --no-build-isolation only)"
    else:
        return True
    if choice == "1":
        sys.exit(f"torch_aclnn_ops: {switch}=1 asks for {what}, but there is {reason}")
    say(f"built without {what}: {reason}")
    return False


def module_of(path: str) -> ModuleType:
    """Run a standalone file of this project without importing its package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_for_header() -> Path:
    """Write the header with the versions of torch and torch_npu that the sources are compiled for."""
    header: Path = module_of("torch_aclnn_ops/_built_for.py").write_header(ROOT / "build" / "built_for.h")
    return header


def instrumentation() -> list[str]:
    """Return the flags that ``TORCH_ACLNN_INSTRUMENT`` requests."""
    if INSTRUMENT:
        return ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={INSTRUMENT}", "-fno-sanitize-recover=all"]
    return []


def generated(target: Path, content: str) -> Path:
    """Write a source, unless it exists, and return its path."""
    if not target.exists() or target.read_text() != content:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    return target


def extension(
    name: str,
    folder: str,
    optimisation: list[str],
    includes: list[Path],
    is_joined: bool = False,
    others: Sequence[Path] = (),
    **options: list[str],
) -> Extension:
    """Return the extension of a folder of csrc for setuptools."""
    from torch.utils.cpp_extension import CppExtension, include_paths

    sources = sorted((ROOT / "csrc" / folder).glob("*.cpp"))
    headers = sorted(path for name in (folder, "autograd") for path in (ROOT / "csrc" / name).glob("*.h"))
    versions = built_for_header()
    # Such sources are compiled as one, because parsing PyTorch's headers takes most of the time.
    together = "".join(f'#include "{source}"\n' for source in sources)
    compiled = [generated(ROOT / "build" / f"{name}.cpp", together)] if is_joined else sources
    return CppExtension(
        f"torch_aclnn_ops.{name}",
        [str(source.relative_to(ROOT)) for source in [*compiled, *others]],
        depends=[str(path.relative_to(ROOT)) for path in [*sources, *headers, versions]],
        extra_compile_args=[
            *("-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", *WERROR, *optimisation),
            *(f"-isystem{include}" for include in [*include_paths(), *includes]),  # others' headers may have warnings
            *("-include", str(versions)),
            *instrumentation(),  # last, so that it takes precedence
        ],
        extra_link_args=instrumentation(),
        **options,
    )


def npu_extension(npu: Path) -> Extension:
    """Return the NPU extension for setuptools, for the folder of an installed torch_npu."""
    folders = [npu / "include", npu / "include" / "third_party" / "acl" / "inc"]
    if cann := os.environ.get("ASCEND_HOME_PATH"):
        folders.append(Path(cann) / "include")  # compare our signatures with those of an installed toolkit
    return extension(
        "_C",
        "npu",
        ["-O2", "-g0"],
        folders,
        is_joined=True,
        others=[generated(ROOT / "build" / "aclnn_api_check.cpp", module_of("csrc/npu/aclnn_api_check.py").source())],
        library_dirs=[str(npu / "lib")],
        libraries=["torch_npu"],
    )


def cpu_extension() -> Extension:
    """Return the CPU extension for setuptools."""
    # at::parallel_for is a template, whose threads are started in this extension.
    return extension("_cpu", "cpu", ["-O2", "-g0", "-fopenmp"], [])


wants_extension = is_wanted("TORCH_ACLNN_NPU", "the NPU extension")
wants_cpu = is_wanted("TORCH_ACLNN_CPU", "the CPU kernels", ("torch",))
extensions = []
if wants_extension and (torch_npu := package_folder("torch_npu")) is not None:
    extensions.append(npu_extension(torch_npu))
if wants_cpu:
    extensions.append(cpu_extension())

commands = {}
if extensions:
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        """Reports which part is compiled, the approximate time, and the time taken."""

        def build_extension(self, ext: Extension) -> None:
            """Compile an extension unless it is up to date."""
            what, minutes = PARTS[ext.name]
            started = time.monotonic()
            say(f"compiling {what}, {minutes} on one core unless nothing has changed")
            super().build_extension(ext)
            say(f"{what}: done after {time.monotonic() - started:.0f} s")

    commands["build_ext"] = Build

setup(ext_modules=extensions, cmdclass=commands)
