"""Build host_npu; all other settings are in pyproject.toml.

The simulated libraries are compiled against the headers of the installed torch and torch_npu: install these first. The
wheel requires neither, because pip would replace them where torch_npu's wheel requires another build of torch; host_npu
itself reports what is missing or incompatible.

``HOST_NPU_INSTRUMENT`` compiles the libraries with sanitizers (``address`` or other values of ``-fsanitize=``);
``HOST_NPU_WERROR=1`` turns compiler warnings into errors.
"""

import importlib.util
import os
import site
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST, NEWEST = (2, 9), (2, 14)
sys.path.insert(0, str(ROOT / "csrc"))

import build as libraries  # noqa: E402


def find_what_is_installed() -> None:
    """Make the packages importable that pip hides from a build because of its isolation."""
    folders = site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    sys.path += [folder for folder in folders if folder not in sys.path]


def check_what_is_installed() -> None:
    """End the build unless torch and torch_npu are installed in the same, supported version."""
    missing = [name for name in ("torch", "torch_npu") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"host_npu: no {' and no '.join(missing)} in {sys.prefix}: install torch and torch_npu first, in a"
            " command of their own, and host_npu with pip"
        )
    installed = libraries.versions()
    torch, torch_npu = (tuple(map(int, version.split(".")[:2])) for version in installed.values())
    if torch != torch_npu or not OLDEST <= torch <= NEWEST:
        listed = " and ".join(f"{name} {version}" for name, version in installed.items())
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        sys.exit(f"host_npu: {listed} are installed: it needs the same version of both, {oldest} to {newest}")


class Build(build_ext):
    """Compile the simulated libraries, into the source tree for an editable installation."""

    def run(self) -> None:
        """Compile the libraries that are out of date."""
        find_what_is_installed()
        check_what_is_installed()
        is_in_place = self.inplace or getattr(self, "editable_mode", False)
        package = ROOT / "host_npu" if is_in_place else Path(self.build_lib) / "host_npu"
        libraries.build(package / "_lib", instrument=os.environ.get("HOST_NPU_INSTRUMENT", ""))


class CompiledDistribution(Distribution):
    """A distribution with compiled code but without extension modules."""

    def has_ext_modules(self) -> bool:
        """Return true, so that setuptools runs ``Build`` and names the platform in the wheel's name."""
        return True


setup(cmdclass={"build_ext": Build}, distclass=CompiledDistribution)
