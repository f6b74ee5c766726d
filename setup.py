"""Build torch_aclnn_ops; everything that can be declared is in pyproject.toml.

Parts are compiled where what they need is installed, and left out, with a line that says so, where it is not:

* ``torch_aclnn_ops._C`` (csrc/npu), the NPU extension, needs torch and torch_npu: ``TORCH_ACLNN_NPU=0`` leaves it out,
  ``1`` fails without them;
* ``torch_aclnn_ops._cpu`` (csrc/cpu), faster losses and optimizer, needs torch: ``TORCH_ACLNN_CPU`` is its switch.

``TORCH_ACLNN_INSTRUMENT`` compiles them so that they check what they do (``address`` and what else ``-fsanitize=``
takes), ``TORCH_ACLNN_WERROR=1`` makes the warnings of the compiler errors. None needs CANN, and torch_npu is not
imported. What is compiled is said on stderr, which pip shows with ``-v``.
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
# For this project's own checks: a newer compiler may warn of what the compilers of today do not.
WERROR = ["-Werror"] if os.environ.get("TORCH_ACLNN_WERROR") == "1" else []

# What the extensions are, and how long they take to compile.
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
    """Decide whether to compile a part: as its switch says, else where what it needs is there."""
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
    """Run a file of this project that can be used alone, without importing the package around it."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_for_header() -> Path:
    """Write the header that says for which torch and torch_npu the sources are compiled."""
    header: Path = module_of("torch_aclnn_ops/_built_for.py").write_header(ROOT / "build" / "built_for.h")
    return header


def instrumentation() -> list[str]:
    """Return the flags that ``TORCH_ACLNN_INSTRUMENT`` asks for."""
    if INSTRUMENT:
        return ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={INSTRUMENT}", "-fno-sanitize-recover=all"]
    return []


def generated(target: Path, content: str) -> Path:
    """Write a source, unless it is there, and return its path."""
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
    """Describe the extension of a folder of csrc to setuptools."""
    from torch.utils.cpp_extension import CppExtension, include_paths

    sources = sorted((ROOT / "csrc" / folder).glob("*.cpp"))
    headers = sorted(path for name in (folder, "autograd") for path in (ROOT / "csrc" / name).glob("*.h"))
    versions = built_for_header()
    # PyTorch's headers take longer than such sources, which are compiled as one.
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
            *instrumentation(),  # behind the others, so that it decides
        ],
        extra_link_args=instrumentation(),
        **options,
    )


def npu_extension(npu: Path) -> Extension:
    """Describe the NPU extension to setuptools, for the folder of an installed torch_npu."""
    folders = [npu / "include", npu / "include" / "third_party" / "acl" / "inc"]
    if cann := os.environ.get("ASCEND_HOME_PATH"):
        folders.append(Path(cann) / "include")  # where a toolkit is installed, its signatures are compared with ours
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
    """Describe the extension for CPUs to setuptools."""
    # at::parallel_for is a template, whose threads are started here.
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
        """Say which part is compiled, how long that takes about, and how long it has taken."""

        def build_extension(self, ext: Extension) -> None:
            """Compile an extension unless it is up to date."""
            what, minutes = PARTS[ext.name]
            started = time.monotonic()
            say(f"compiling {what}, {minutes} on one core unless nothing has changed")
            super().build_extension(ext)
            say(f"{what}: done after {time.monotonic() - started:.0f} s")

    commands["build_ext"] = Build

setup(ext_modules=extensions, cmdclass=commands)
