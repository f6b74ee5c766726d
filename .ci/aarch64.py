"""Build everything for aarch64 on an x86-64 machine and test it under emulation: ``make aarch64``.

First the host NPU is cross-compiled against the aarch64 wheels, and its C++ tests run under qemu: with pages of 4 KiB,
and, linked statically, of 64 KiB (which qemu does not support for dynamic programs). Then torch, torch_npu and this
package, compiled by the same compiler, are installed in a Debian for arm64, where the doctor checks them on the CPU and
on the host NPU. That requires root; ``--only-cpp`` skips it.

Downloads and builds are kept in ``.aarch64``, so that a second run is faster.
"""

import argparse
import importlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import _copy
from _copy import REPOSITORY
from packaging.requirements import Requirement

sys.path.insert(0, str(REPOSITORY / "host-npu"))

from tests import _c_program  # noqa: E402

_CACHE = REPOSITORY / ".aarch64"
_TREE = _CACHE / "tree"
_ROOT = _CACHE / "root"
_COMPILER = "aarch64-linux-gnu-g++"
_TOOLS = {_COMPILER: "g++-aarch64-linux-gnu", "qemu-aarch64-static": "qemu-user-static"}
_STARTS_PROGRAMS, _MAKES_DEBIAN = {"update-binfmts": "binfmt-support"}, {"debootstrap": "debootstrap"}
_DEBIAN, _PYTHON = "bookworm", "3.11"
_PLATFORMS = [f"--platform=manylinux_2_{version}_aarch64" for version in (28, 17)]
_MARKERS = {
    "platform_machine": "aarch64",
    "python_version": _PYTHON,
    "python_full_version": f"{_PYTHON}.0",
    "extra": "",
}
# The host NPU reserves terabytes of addresses, and qemu would keep a record for each page. With 64 GiB, the addresses
# for captures of graphs would soon be fragmented.
_QEMU = {"QEMU_RESERVED_VA": "128G"}
_QEMU_LIBRARIES = {"QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu"}
_FORMATS = Path("/proc/sys/fs/binfmt_misc")

_MOUNTS_END_WITH_IT = ["unshare", "--mount", "--propagation=private"]
# The machine's cross compiler is mounted in the other Debian, where it runs at full speed.
_ENTER = """
root=$1; tree=$2; wheels=$3; shift 3
mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" && mount --rbind /sys "$root/sys"
for mounted in /usr:/cross /lib64:/lib64 /usr/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu "$tree:/tree" \\
    "$wheels:/wheels"; do
    mkdir -p "$root/${mounted#*:}" && mount --bind "${mounted%%:*}" "$root/${mounted#*:}" || exit 1
done
exec chroot "$root" "$@"
"""


def _check_machine(only_cpp: bool) -> None:
    """Exit with a list of everything that is missing, before downloading and building."""
    if platform.machine() != "x86_64":
        sys.exit(f"this is for x86-64 machines, and this one is {platform.machine()}: run make test")
    starts_programs = (_FORMATS / "qemu-aarch64").exists()
    if os.geteuid() != 0 and not starts_programs:
        sys.exit("programs for aarch64 are not started here; as root: update-binfmts --enable qemu-aarch64")
    if os.geteuid() != 0 and not only_cpp:
        sys.exit("to make a Debian for arm64 takes root; --only-cpp does without")
    tools = _TOOLS | ({} if starts_programs else _STARTS_PROGRAMS) | ({} if only_cpp else _MAKES_DEBIAN)
    missing = [package for tool, package in tools.items() if shutil.which(tool) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} not installed: apt-get install {' '.join(missing)}")


def _made(target: Path, make: Callable[[Path], object]) -> Path:
    """Return a folder that is created once, under another name until it is complete."""
    if not target.exists():
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(target)
    return target


def _say(what: str, since: float) -> None:
    print(f"{what}: {(time.monotonic() - since) / 60:.1f} minutes", flush=True)


def _download(to: Path, *arguments: str) -> None:
    # Wheels of another platform can only be downloaded, so the emulated pip needs neither network nor settings.
    command = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={to}", f"--python-version={_PYTHON}"]
    subprocess.run([*command, *_PLATFORMS, "--only-binary=:all:", *arguments], check=True, timeout=3600)


def _download_all(version: str, to: Path) -> None:
    _download(to, "--no-deps", f"torch=={version}", f"torch_npu=={version}")
    # pip would evaluate the conditions of torch's requirements for this machine, and download CUDA's libraries.
    needed = [Requirement(line) for wheel in sorted(to.glob("torch*.whl")) for line in _requirements(wheel)]
    fitting = [needs for needs in needed if needs.marker is None or needs.marker.evaluate(_MARKERS)]
    others = [f"{needs.name}{needs.specifier}" for needs in fitting if needs.name not in ("torch", "torch_npu")]
    _download(to, *others, "numpy", "pyyaml", "setuptools>=77", "ninja")


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def _unpack(wheels: Path, to: Path) -> None:
    for wheel in wheels.glob("torch*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)


def _static_links() -> list[str]:
    """Return the objects of the libraries that the C++ tests need, for linking statically."""
    sys.path.insert(0, str(_TREE / "host-npu" / "csrc"))
    build = importlib.import_module("build")
    folder = _TREE / "host-npu" / "build" / "release"
    objects: list[Path] = []
    for library in build.libraries():
        if library.name in _c_program.LIBRARIES:
            joined = [f"{folder.name}/{library.name}.cpp"]
            objects += [folder / f"{source}.o" for source in (joined if library.joined else library.sources)]
    return ["-static", *map(str, objects)]


def check_host_npu(site: Path, compiler: list[str]) -> bool:
    """Cross-compile the host NPU and run its C++ tests; return whether all passed."""
    start = time.monotonic()
    libraries = _TREE / "host-npu" / "host_npu" / "_lib"
    subprocess.run(
        [sys.executable, "csrc/build.py", str(libraries)],
        cwd=_TREE / "host-npu",
        env={**os.environ, "PYTHONPATH": str(site), "CXX": shlex.join(compiler)},
        check=True,
    )
    _say("the host NPU is built", start)
    links = [_c_program.shared(libraries), _static_links()]
    dynamic, static = _c_program.compiled(compiler, links, torch_npu=site / "torch_npu")
    _let_programs_start_themselves()
    usual = [_QEMU_LIBRARIES | configuration for configuration in _c_program.CONFIGURATIONS]
    passed = [
        _test_program("pages of 4 KiB", [str(dynamic)], usual),
        _test_program("pages of 64 KiB", [str(static)], [{"QEMU_PAGESIZE": "65536"}]),
    ]
    return all(passed)


def _let_programs_start_themselves() -> None:
    """Enable this machine to start aarch64 programs, as the C++ tests with several processes do."""
    if (_FORMATS / "qemu-aarch64").exists():
        return
    if not any(_FORMATS.glob("*")):
        subprocess.run(["mount", "-t", "binfmt_misc", "none", str(_FORMATS)], check=True)
    subprocess.run(["update-binfmts", "--enable", "qemu-aarch64"], check=True)


def _test_program(what: str, command: list[str], configurations: list[dict[str, str]]) -> bool:
    start = time.monotonic()
    said = _c_program.results(command, configurations, timeout=1200)
    ran = [(name, one) for name, each in said.items() for one in each]
    failed = [f"{name}: {one}" for name, one in ran if one != "ok"]
    print("\n".join(failed), end="\n" * bool(failed))
    counts = f"{len(ran) - len(failed)} passed and {len(failed)} failed"
    _say(f"C++ tests with {what}: {len(said)} cases, {counts} in {len(configurations)} configurations", start)
    return not failed and _c_program.LAST in said


def check_package(version: str, wheels: Path) -> bool:
    """Install torch and the package in a Debian for arm64 and verify it there; return whether it passed."""
    start = time.monotonic()
    include = "--include=python3-dev,python3-venv,libgomp1"  # libgomp1 comes with every g++, but here g++ is mounted
    command = [*_MOUNTS_END_WITH_IT, "debootstrap", "--arch=arm64", "--variant=minbase", include, _DEBIAN]
    _made(_ROOT, lambda part: subprocess.run([*command, str(part)], check=True, stdout=subprocess.DEVNULL))
    _say("there is a Debian for arm64", start)
    environment = f"/environments/{version}"
    torch = f"torch=={version} torch_npu=={version} numpy pyyaml 'setuptools>=77' ninja"
    install = "python -m pip install --quiet --no-index --find-links=/wheels --no-compile"
    steps = {
        "torch is installed": f"test -e {environment}/installed || {{ python3 -m venv --clear {environment} &&"
        f" {install} {torch} && touch {environment}/installed; }}",
        "the package is compiled": "mkdir -p build && { TORCH_ACLNN_NPU=1 python setup.py --quiet build_ext --inplace"
        " > build/log 2>&1 || { cat build/log; exit 1; }; }",
        "the package is installed": f"TORCH_ACLNN_NPU=1 {install} --no-build-isolation --editable .",
        # It uses the libraries that were compiled before.
        "verified on the CPU": "python -m torch_aclnn_ops.doctor --check --device cpu",
        "verified on the host NPU": "python -m host_npu -m torch_aclnn_ops.doctor --check",
    }
    settings = {"HOME": "/root", "PATH": f"{environment}/bin:/usr/bin:/bin", "MAX_JOBS": "2"}
    # torch's extensions are also linked with CXX.
    settings |= {
        "CXX": f"/cross/bin/{_COMPILER}",
        "TORCH_ACLNN_WERROR": "1",
        "HOST_NPU_WERROR": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": "/tree/host-npu",
    }
    return all(_run_inside(what, step, settings | _QEMU, wheels) for what, step in steps.items())


def _run_inside(what: str, command: str, settings: dict[str, str], wheels: Path) -> bool:
    start = time.monotonic()
    enter = [
        "unshare",
        "--mount",
        "--propagation=private",
        "sh",
        "-c",
        _ENTER,
        "sh",
        str(_ROOT),
        str(_TREE),
        str(wheels),
    ]
    environment = ["env", "-i", *(f"{name}={value}" for name, value in settings.items())]
    result = subprocess.run([*enter, *environment, "sh", "-c", f"cd /tree && {command}"], timeout=3600)
    _say(what if result.returncode == 0 else f"FAILED with {result.returncode}: {what}", start)
    return result.returncode == 0


def main() -> int:
    """Run the selected tests."""
    parser = argparse.ArgumentParser(description="Build and test for aarch64 on an x86-64 machine.")
    parser.add_argument("--torch", default="2.9.1", metavar="VERSION", help="of torch and torch_npu (default: 2.9.1)")
    parser.add_argument("--only-cpp", action="store_true", help="without a Debian for arm64, which takes root")
    arguments = parser.parse_args()
    _check_machine(arguments.only_cpp)
    os.environ.update(_QEMU, HOST_NPU_WERROR="1")
    start = time.monotonic()
    version = arguments.torch
    wheels = _made(_CACHE / f"wheels-{version}", lambda part: _download_all(version, part))
    site = _made(_CACHE / f"site-{version}", lambda part: _unpack(wheels, part))
    _copy.update(_TREE)
    _say("wheels and sources are there", start)
    compiler = shlex.split(os.environ.get("CXX", _COMPILER))
    passed = check_host_npu(site, compiler)
    if not arguments.only_cpp:
        passed = check_package(version, wheels) and passed
    _say(f"aarch64, torch {version}: {'all passed' if passed else 'FAILED'}", start)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
