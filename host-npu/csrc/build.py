"""Compile the host NPU's libraries: ``python csrc/build.py [DESTINATION]``.

Each folder with sources is a library of the same name. The C++ compiler is called directly, and nothing is compiled
again that has not changed. Only the libraries ``host_npu_*`` need PyTorch's headers; the others take the few headers of
the ABI that the torch_npu wheel contains.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
PROJECT = SOURCES.parent
DEFAULT_DESTINATION = PROJECT / "host_npu" / "_lib"

_FLAGS = [
    *("-std=c++20", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-pthread"),
    *("-Wall", "-Wextra", "-DFUNC_VISIBILITY"),
    # Sizes and strides are the caller's: in what phase one makes of them, too large a number wraps around.
    "-fwrapv",
]
# Another compiler's new warning must not keep anybody from installing.
_WARNINGS_ARE_ERRORS = os.environ.get("HOST_NPU_WERROR") == "1"
# x86-64-v3 would be quicker, but a wheel may be moved to an older machine. Loops over elements are worth vectors,
# whatever their length.
_OPTIMISATION = "-O2", "-fvect-cost-model=dynamic"
# What only calls torch is no faster by it, and takes a third longer to compile.
_CALLS_OF_TORCH = ("-O1",)
# The device rounds a product before it adds to it. Nobody asks for errno or for traps, which keep square roots and
# comparisons from being vectors.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_HEADER = """\
#pragma once

#include "aclnn/acl_meta.h"

extern "C" {{
ACLNN_API aclnnStatus {name}GetWorkspaceSize{parameters};
ACLNN_API aclnnStatus {name}(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);
}}
"""
# CANN's names of headers that are not those of their functions.
_OTHER_HEADERS = {"aclnnInplaceCopy": "aclnn_copy"}
_EXPECTED = "the simulated libraries; all of them take about two minutes of one core"


class BuildError(RuntimeError):
    """Raised when the host NPU cannot be compiled; says why."""


@dataclass(frozen=True)
class Library:
    """A shared library: what it is linked with, and how its sources, those of the folder of its name, are compiled.

    Attributes:
        name: The name of the library and of the folder.
        links: Libraries of this project.
        torch: Libraries of the torch package.
        torch_npu: Libraries of the torch_npu package.
        joined: Compile the sources as one, because their headers take longer than they do.
        flags: What the compiler and the linker are told beside the flags of all libraries.
        optimisation: The same, unless it is to instrument them.
        functions: The functions of CANN whose names its sources include, by what their names begin with.
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
        """The file name, which is the SONAME too: torch_npu finds the libraries by it."""
        return f"lib{self.name}.so"

    @property
    def sources(self) -> tuple[str, ...]:
        """The paths of the sources in this folder."""
        return tuple(sorted(f"{self.name}/{file.name}" for file in (SOURCES / self.name).glob("*.cpp")))


# What is special about a library; a folder that is not named here needs nothing.
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
    Library("host_npu_loader", torch=("c10",)),
)


def libraries() -> list[Library]:
    """Return a library for each folder with sources, each after those it is linked with."""
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
    """Compile every library that is missing or older than what it is made of.

    Args:
        destination: Folder for the libraries; made if there is none.
        instrument: What :func:`instrumentation` takes.
        names: The libraries to compile, among them those that the others are linked with; all of them if it is empty.
        verbose: Print each command.

    Returns:
        The libraries' paths.

    Raises:
        BuildError: There is no torch_npu or no compiler, or the compiler refused a source.
    """
    destination = Path(destination).resolve()
    destination.mkdir(parents=True, exist_ok=True)
    builder = _Builder(destination, instrument, verbose)
    wanted = [library for library in libraries() if not names or library.name in names]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # What takes longest is started first.
        longest_first = sorted(wanted, key=lambda library: not library.torch)
        compiled = {library: builder.objects_of(library, pool) for library in longest_first}
        linked = []
        for number, library in enumerate(wanted, 1):
            linked.append(builder.link(library, [object.result() for object in compiled[library]]))
            builder.report(library, f"{number} of {len(wanted)}")
    if not names:
        # What programs include of CANN's interface, and torch_npu's wheel lacks.
        shutil.copytree(SOURCES / "include", destination / "include", dirs_exist_ok=True)
        declare(operators(), destination / "include")
        # A sanitizer must be in the process from its start, and another machine's libraries cannot be.
        if not instrument and _machine(linked[0]) == _machine(Path(sys.executable)):
            declare(_formulas(destination), destination / "include")
        (destination / "versions.json").write_text(json.dumps(versions()) + "\n")
    return linked


def _machine(program: Path) -> bytes:
    """Return for which machine an ELF file is."""
    with program.open("rb") as file:
        return file.read(20)[18:]


def operators() -> dict[str, str]:
    """Return the parameters of the first phase of each operator that ``opapi`` has the checks of, by its name."""
    text = "".join((SOURCES / source).read_text() for source in Library("opapi").sources)
    found = re.findall(r"^HOST_NPU_PHASE_ONE (aclnn\w+)GetWorkspaceSize(\([^)]*\))", text, re.MULTILINE)
    return {name: " ".join(parameters.split()) for name, parameters in found}


def declare(functions: dict[str, str], include: Path) -> list[Path]:
    """Write the header of each function of CANN, by the parameters of its first phase, and return their paths."""
    headers = []
    for name, parameters in functions.items():
        words = re.sub("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]|V[0-9])", "_", name).lower()
        target = include / "aclnnop" / f"{_OTHER_HEADERS.get(name, words)}.h"
        headers.append(_written(_HEADER.format(name=name, parameters=parameters), target))
    return headers


def _formulas(destination: Path) -> dict[str, str]:
    """Return the same of each operator that a formula computes."""
    code = """
import ctypes, sys, torch
function = ctypes.CDLL(sys.argv[1]).host_npu_arguments
function.restype = ctypes.c_char_p
print(function().decode(), end="")
"""
    command = [sys.executable, "-c", code, str(destination / "libhost_npu_formulas.so")]
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise BuildError(f"the libraries cannot be loaded:\n{result.stderr}")
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


def instrumentation(kind: str) -> list[str]:
    """Return the flags of sanitizers, which ``-fsanitize=`` takes."""
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={kind}", "-fno-sanitize-recover=all"]
    # An enumeration of CANN's C interface may be any number: the caller is perhaps a C program.
    return [*flags, "-fno-sanitize=enum"] if "undefined" in kind else flags


def joined(sources: list[Path], target: Path) -> Path:
    """Write a source that includes others, unless it is there, and return its path."""
    return _written("".join(f'#include "{source.resolve()}"\n' for source in sources), target)


def functions_of_torch_npu(prefix: str) -> list[str]:
    """Return the names of two-phase functions that the installed torch_npu asks for; they stand in its libraries."""
    content = b"".join(file.read_bytes() for file in sorted((_package("torch_npu") / "lib").glob("*.so")))
    # What is in front of a string in a library is the end of anything.
    names = re.findall(rb"(" + prefix.encode() + rb"\w+?)GetWorkspaceSize(?=\0)", content)
    return sorted({name.decode() for name in names})


def _written(content: str, target: Path) -> Path:
    if not target.exists() or target.read_text() != content:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    return target


class _Builder:
    def __init__(self, destination: Path, instrument: str, verbose: bool) -> None:
        self.destination = destination
        self.flags = _FLAGS
        self.instrument = instrumentation(instrument) if instrument else []
        self.objects = PROJECT / "build" / (instrument.replace(",", "-") or "release")
        # Clang leaves the functions of a sanitizer to the program.
        self.complete = [] if instrument else ["-Wl,-z,defs"]
        self.verbose = verbose
        self.compiler = shlex.split(os.environ.get("CXX", "g++"))
        self.started = time.monotonic()
        self.lock = threading.Lock()  # of what follows, which the compilers' threads share
        self.made: set[Path] = set()  # by a command, in this build

    def report(self, library: Library, number: str) -> None:
        """Say that a library is linked, unless it was up to date."""
        if self.destination / library.file in self.made:
            seconds = time.monotonic() - self.started
            print(f"host_npu: {library.file} ({number}), after {seconds:.0f} s", file=sys.stderr, flush=True)

    def objects_of(self, library: Library, pool: Executor) -> list[Future[Path]]:
        """Start to compile the sources of one library that are not up to date."""
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
        """Write the names that the library's sources include, and return the folder of the file.

        They do not include those that they define.
        """
        sources = "".join((SOURCES / source).read_text() for source in library.sources)
        names = (name for name in functions_of_torch_npu(library.functions) if f" {name}(" not in sources)
        lines = "".join(f"HOST_NPU_FUNCTION({name})\n" for name in names)
        return _written(lines, self.objects / "names" / f"{library.name}_functions.inc").parent

    def link(self, library: Library, objects: list[Path]) -> Path:
        """Link one library unless it is up to date."""
        target = self.destination / library.file
        # Also those that its sources do not use: who looks for a function in a library finds it in these too.
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
        """Run a command that makes ``target``, unless the same command made it after the last change of an input.

        Whether warnings are errors changes no object: one that was made without a warning is up to date either way.
        """
        key = hashlib.sha256("\0".join(command).encode()).hexdigest()
        accepted = {key} if _WARNINGS_ARE_ERRORS else {key, f"{key} with warnings"}
        # Links are recorded with the objects: nothing but libraries belongs where a package takes its files from.
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
    # Other projects' headers may have warnings.
    return [f"-I{SOURCES}", f"-I{SOURCES / 'include'}", *(f"-isystem{folder}" for folder in folders)]


def versions() -> dict[str, str]:
    """Return what the libraries are compiled for; builds of torch for CUDA and for the CPU alone are compatible."""
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
    """Build from the command line."""
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
