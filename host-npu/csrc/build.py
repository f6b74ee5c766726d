"""Compile the host NPU's libraries: ``python csrc/build.py [DESTINATION]``.

Each folder with sources is a library of the same name. The C++ compiler is called directly, and unchanged sources are
not recompiled. Only the libraries ``host_npu_*`` need PyTorch's headers; the others need only the few ABI headers in
the torch_npu wheel.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from function_headers import SOURCES, BuildError, two_phase_functions, write_headers, written

PROJECT = SOURCES.parent
DEFAULT_DESTINATION = PROJECT / "host_npu" / "_lib"

_FLAGS = [
    *("-std=c++20", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-pthread"),
    *("-Wall", "-Wextra", "-DFUNC_VISIBILITY"),
    # Phase one computes with the caller's sizes and strides, which may overflow.
    "-fwrapv",
]
# A new warning of another compiler must not break an installation.
_WARNINGS_ARE_ERRORS = os.environ.get("HOST_NPU_WERROR") == "1"
# x86-64-v3 would be faster, but a wheel may be moved to an older machine. Loops of any length are worth vectorizing.
_OPTIMISATION = "-O2", "-fvect-cost-model=dynamic"
# Code that only calls torch gains nothing from -O2, which takes a third longer to compile.
_CALLS_OF_TORCH = ("-O1",)
# The device rounds a product before adding to it. Nothing reads errno or traps, which prevent the vectorization of
# square roots and comparisons.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_EXPECTED = "the simulated libraries; all of them take about two minutes of one core"


@dataclass(frozen=True)
class Library:
    """A shared library: its links, and the compilation of its sources, which are in the folder of the same name.

    Attributes:
        name: The name of the library and of the folder.
        links: Libraries of this project.
        torch: Libraries of the torch package.
        torch_npu: Libraries of the torch_npu package.
        joined: Compile the sources as one, because parsing their headers takes most of the time.
        flags: Flags of the compiler and the linker, in addition to those of all libraries.
        optimisation: Further flags, which a sanitizer build omits.
        functions: The prefix of the functions of CANN whose names its sources include.
    """

    name: str
    links: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    torch_npu: tuple[str, ...] = ()
    joined: bool = False
    flags: tuple[str, ...] = ()
    optimisation: tuple[str, ...] = _OPTIMISATION
    functions: str = ""

    @property
    def file(self) -> str:
        """The file name, which is also the SONAME, by which torch_npu finds the library."""
        return f"lib{self.name}.so"

    @property
    def sources(self) -> tuple[str, ...]:
        """The paths of the sources in this folder."""
        return tuple(sorted(f"{self.name}/{file.name}" for file in (SOURCES / self.name).glob("*.cpp")))


# Libraries with special needs; other folders need no entry.
_SPECIAL = (
    Library("ascendcl", joined=True),
    Library("acl_op_compiler", links=("ascendcl",)),
    Library("hccl", links=("ascendcl",), joined=True),
    Library("hcomm", links=("hccl", "ascendcl")),
    Library("nnopbase", links=("ascendcl",), joined=True),
    Library("opapi", links=("nnopbase", "ascendcl"), flags=_ARITHMETIC, functions="acl"),
    Library(
        "atb",
        links=("ascendcl",),
        torch=("torch_cpu", "c10"),
        joined=True,
        optimisation=_CALLS_OF_TORCH,
        functions="Atb",
    ),
    Library(
        "host_npu_aten", links=("ascendcl", "opapi"), torch=("torch_cpu", "c10"), torch_npu=("torch_npu",), joined=True
    ),
    Library(
        "host_npu_formulas",
        links=("acl_op_compiler", "ascendcl", "hccl", "nnopbase", "opapi"),
        torch=("torch_cpu", "c10"),
        joined=True,
        flags=("-fopenmp",),  # at::parallel_for
        optimisation=_CALLS_OF_TORCH,
    ),
    # torch 2.10 and 2.11 keep the registered keys in an inline function, which must not have a copy in this library.
    Library("host_npu_loader", torch=("c10",), flags=("-fno-visibility-inlines-hidden",)),
)


def libraries() -> list[Library]:
    """Return a library for each folder with sources, dependencies first."""
    folders = {file.parent.name for file in SOURCES.glob("*/*.cpp")} - {"tests"}
    found = {name: Library(name) for name in folders} | {library.name: library for library in _SPECIAL}
    order = TopologicalSorter({name: found[name].links for name in sorted(found)})
    return [found[name] for name in order.static_order()]


def build(
    destination: Path | str = DEFAULT_DESTINATION,
    *,
    instrument: str = "",
    names: Collection[str] = (),
    verbose: bool = False,
) -> list[Path]:
    """Compile every library that is missing or older than its inputs.

    Args:
        destination: Folder for the libraries; created if missing.
        instrument: The argument of :func:`instrumentation`.
        names: The libraries to compile, including those that they are linked with; all if empty.
        verbose: Print each command.

    Returns:
        The paths of the libraries.

    Raises:
        BuildError: torch_npu or the compiler is missing, or compilation failed.
    """
    destination = Path(destination).resolve()
    destination.mkdir(parents=True, exist_ok=True)
    builder = _Builder(destination, instrument, verbose)
    wanted = [library for library in libraries() if not names or library.name in names]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Start the slowest libraries first.
        longest_first = sorted(wanted, key=lambda library: not library.torch)
        compiled = {library: builder.objects_of(library, pool) for library in longest_first}
        linked = []
        for number, library in enumerate(wanted, 1):
            linked.append(builder.link(library, [object.result() for object in compiled[library]]))
            builder.report(library, f"{number} of {len(wanted)}")
    if not names:
        # A sanitizer must be loaded when the process starts, and another machine's libraries cannot be loaded.
        can_be_loaded = not instrument and _machine(linked[0]) == _machine(Path(sys.executable))
        formulas = destination / "libhost_npu_formulas.so" if can_be_loaded else None
        write_headers(destination / "include", formulas)
        (destination / "versions.json").write_text(json.dumps(versions()) + "\n")
    return linked


def _machine(program: Path) -> bytes:
    """Return the machine of an ELF file."""
    with program.open("rb") as file:
        return file.read(20)[18:]


def instrumentation(kind: str) -> list[str]:
    """Return the flags for sanitizers, named as for ``-fsanitize=``."""
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={kind}", "-fno-sanitize-recover=all"]
    # An enumeration in CANN's C interface may hold any number: the caller may be a C program.
    return [*flags, "-fno-sanitize=enum"] if "undefined" in kind else flags


def joined(sources: list[Path], target: Path) -> Path:
    """Write a source that includes others, unless it exists, and return its path."""
    return written("".join(f'#include "{source.resolve()}"\n' for source in sources), target)


class _Builder:
    def __init__(self, destination: Path, instrument: str, verbose: bool) -> None:
        self.destination = destination
        self.flags = _FLAGS
        self.instrument = instrumentation(instrument) if instrument else []
        self.objects = PROJECT / "build" / (instrument.replace(",", "-") or "release")
        # With Clang, the program provides a sanitizer's functions.
        self.complete = [] if instrument else ["-Wl,-z,defs"]
        self.verbose = verbose
        self.compiler = shlex.split(os.environ.get("CXX", "g++"))
        self.started = time.monotonic()
        self.lock = threading.Lock()  # guards the fields below, which compiler threads share
        self.made: set[Path] = set()  # files written by a command in this build

    def report(self, library: Library, number: str) -> None:
        """Report a linked library, unless it was up to date."""
        if self.destination / library.file in self.made:
            seconds = time.monotonic() - self.started
            print(f"host_npu: {library.file} ({number}), after {seconds:.0f} s", file=sys.stderr, flush=True)

    def objects_of(self, library: Library, pool: Executor) -> list[Future[Path]]:
        """Start compiling the sources of a library that are not up to date."""
        if not library.sources:
            raise BuildError(f"{library.file} has no sources in {SOURCES / library.name}")
        flags = [*library.flags, *(self.instrument or library.optimisation), *_include_folders(library)]
        if library.functions:
            flags.append(f"-I{self.names_of_functions(library)}")
        sources = [SOURCES / source for source in library.sources]
        if library.joined:
            sources = [joined(sources, self.objects / f"{library.name}.cpp")]
        return [pool.submit(self.object, source, flags) for source in sources]

    def names_of_functions(self, library: Library) -> Path:
        """Write the names that the library's sources include but do not define, and return the file's folder."""
        sources = "".join((SOURCES / source).read_text() for source in library.sources)
        known = two_phase_functions(_package("torch_npu") / "lib", library.functions)
        names = (name for name in known if f" {name}(" not in sources)
        lines = "".join(f"HOST_NPU_FUNCTION({name})\n" for name in names)
        return written(lines, self.objects / "names" / f"{library.name}_functions.inc").parent

    def link(self, library: Library, objects: list[Path]) -> Path:
        """Link a library unless it is up to date."""
        target = self.destination / library.file
        # Also link unused libraries: a function that is looked up in this library must be found in them, too.
        links = ["-Wl,--no-as-needed", *(f"-l{name}" for name in library.links)]
        for package, names in (("torch", library.torch), ("torch_npu", library.torch_npu)):
            if names:
                links += [f"-L{_package(package) / 'lib'}", *(f"-l{name}" for name in names)]
        command = [
            *(*self.compiler, "-shared", *self.flags, *library.flags, *self.instrument),
            *("-o", str(target), *map(str, objects)),
            *(f"-Wl,-soname,{library.file}", "-Wl,-rpath,$ORIGIN", *self.complete, f"-L{self.destination}", *links),
        ]
        inputs = [*objects, *(self.destination / f"lib{name}.so" for name in library.links)]
        self.run_if_needed(command, target, inputs)
        return target

    def object(self, source: Path, flags: list[str]) -> Path:
        """Compile one source unless its object is up to date."""
        target = self.objects / source.parent.name / f"{source.name}.o"
        dependencies = target.with_suffix(".d")
        command = [*self.compiler, *self.flags, *flags, "-MMD", "-MF", str(dependencies)]
        command += ["-c", str(source), "-o", str(target)]
        inputs = _listed(dependencies) if dependencies.exists() else [source]
        self.run_if_needed(command, target, inputs)
        return target

    def run_if_needed(self, command: list[str], target: Path, inputs: list[Path]) -> None:
        """Run a command that makes ``target``, unless the same command made it since the last change of an input.

        Turning warnings into errors changes no object, so one that was made without a warning is up to date either way.
        """
        key = hashlib.sha256("\0".join(command).encode()).hexdigest()
        accepted = {key} if _WARNINGS_ARE_ERRORS else {key, f"{key} with warnings"}
        # Keep the records of links next to the objects: a package takes its files from the libraries' folder.
        record = self.objects / f"{target.name}-{hashlib.sha256(str(target).encode()).hexdigest()[:8]}.key"
        if _is_newer(target, inputs) and record.exists() and record.read_text() in accepted:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        with self.lock:
            if not self.made:
                print(f"host_npu: compiling {_EXPECTED}", file=sys.stderr, flush=True)
            self.made.add(target)
        if self.verbose:
            print(shlex.join(command), flush=True)
        try:
            werror = ["-Werror"] * _WARNINGS_ARE_ERRORS
            result = subprocess.run([*command, *werror], capture_output=True, text=True)
        except FileNotFoundError:
            raise BuildError(f"there is no C++ compiler {self.compiler[0]}: install g++ or set CXX") from None
        if result.returncode != 0:
            raise BuildError(f"{shlex.join(command)}\n{result.stderr}")
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(f"{key} with warnings" if result.stderr else key)


def _include_folders(library: Library) -> list[str]:
    npu = _package("torch_npu") / "include"
    folders = [npu, npu / "third_party" / "acl" / "inc", npu / "third_party" / "hccl" / "inc"]
    if library.torch:
        torch = _package("torch") / "include"
        folders += [torch, torch / "torch" / "csrc" / "api" / "include"]
    # Headers of other projects may cause warnings.
    return [f"-I{SOURCES}", f"-I{SOURCES / 'include'}", *(f"-isystem{folder}" for folder in folders)]


def versions() -> dict[str, str]:
    """Return the versions that the libraries are compiled for; CUDA and CPU builds of torch are compatible."""
    return {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "torch_npu")}


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(f"the host NPU needs the headers in {name}, which is not installed")
    return Path(spec.origin).parent


def _listed(dependencies: Path) -> list[Path]:
    words = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1]
    return [Path(word) for word in shlex.split(words)]


def _is_newer(target: Path, inputs: list[Path]) -> bool:
    if not target.exists():
        return False
    made = target.stat().st_mtime_ns
    return all(file.exists() and file.stat().st_mtime_ns <= made for file in inputs)


def main() -> int:
    """Run the build from the command line."""
    parser = argparse.ArgumentParser(description="Compile the host NPU's libraries.")
    parser.add_argument("destination", type=Path, nargs="?", default=DEFAULT_DESTINATION)
    parser.add_argument("--instrument", default="", metavar="KIND", help="what -fsanitize= takes")
    parser.add_argument("--names", nargs="+", default=(), metavar="LIBRARY", help="compile only these libraries")
    parser.add_argument(
        "--without-torch", action="store_true", help="compile only those that torch_npu's headers are enough for"
    )
    parser.add_argument("--verbose", action="store_true", help="print each command")
    arguments = parser.parse_args()
    names = [library.name for library in libraries() if not library.torch]
    try:
        build(
            arguments.destination,
            instrument=arguments.instrument,
            names=names if arguments.without_torch else arguments.names,
            verbose=arguments.verbose,
        )
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
