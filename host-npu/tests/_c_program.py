"""The C++ program of the simulated operators' test cases, compiled and run once for each configuration."""

import hashlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import host_npu
from host_npu import _torch_npu

LAST = "nothing_is_alive_at_the_end"

PROJECT = Path(__file__).resolve().parents[1]
_SOURCES = PROJECT / "csrc"
_INCLUDE = _SOURCES / "include"
# The headers of the operators, and operators.h, which includes all of them.
_DECLARED = PROJECT / "build" / "include"
_FUNCTIONS = runpy.run_path(str(_SOURCES / "function_headers.py"))
# The parameters of phase one of each operator.
OPERATORS: dict[str, str] = _FUNCTIONS["operators"]()
# The libraries that the program links against.
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "nnopbase", "opapi")
SOURCES = sorted((_SOURCES / "tests").glob("*.cpp"))
_HEADERS = sorted((_SOURCES / "tests").glob("*.h"))
CONFIGURATIONS = [{"HOST_NPU_SOC": soc} for soc in host_npu.SOCS]
CONFIGURATIONS += [{"DISABLE_L2_CACHE": "1"}, {"ACLNN_CACHE_LIMIT": "0"}]
CONFIGURATIONS += [{"HOST_NPU_STRICT_MEMORY": "1"}]


def instrumented(kind: str, compiler: str = "g++", names: Sequence[str] = LIBRARIES) -> Path:
    """Compile libraries of the program with sanitizers.

    Args:
        kind: The value of ``--instrument`` of csrc/build.py.
        compiler: The C++ compiler.
        names: The libraries.

    Returns:
        The libraries' folder.
    """
    libraries = PROJECT / "build" / f"libraries-{kind.replace(',', '-')}-{len(names)}"
    command = [sys.executable, "csrc/build.py", str(libraries), "--instrument", kind, "--names", *names]
    subprocess.run(command, cwd=PROJECT, env=os.environ | {"CXX": compiler}, check=True)
    return libraries


def names() -> list[str]:
    """Return the names of the cases."""
    cases = re.compile(r"^CASE\(\"([^\"]+)\"", re.MULTILINE)
    return [name for source in SOURCES for name in cases.findall(source.read_text())]


def shared(libraries: Path, names: Sequence[str] = LIBRARIES) -> list[str]:
    """Return the compiler options that link a program with the host NPU's libraries in a folder."""
    return [f"-L{libraries}", *(f"-l{name}" for name in reversed(names)), f"-Wl,-rpath,{libraries}"]


def compiled(
    compiler: Sequence[str],
    links: Sequence[Sequence[str]],
    sources: Sequence[Path] = SOURCES,
    torch_npu: Path | None = None,
) -> list[Path]:
    """Return the paths of the compiled programs, which are rebuilt when an input changes.

    Args:
        compiler: The command of the C++ compiler.
        links: What each of the programs links: compiler options and objects.
        sources: The sources of the programs.
        torch_npu: The folder of the package torch_npu, whose headers are used; by default the installed one.
    """
    torch_npu = torch_npu or _torch_npu.folder()
    assert torch_npu is not None
    include = torch_npu / "include"
    wheel = [include / "third_party" / "acl" / "inc", include / "third_party" / "hccl" / "inc", include]
    command = [*compiler, f"-I{_SOURCES}", f"-I{_INCLUDE}", f"-I{_DECLARED}"]
    command += [f"-isystem{folder}" for folder in wheel]
    declared = _FUNCTIONS["declare"](OPERATORS, _DECLARED)
    _DECLARED.joinpath("operators.h").write_text("".join(f'#include "aclnnop/{header.name}"\n' for header in declared))
    headers = [*_HEADERS, *(_SOURCES / "tests" / "fuzz").glob("*.h"), *_INCLUDE.rglob("*.h"), *declared]
    folder = PROJECT / "build" / f"abi-{_key([command], [*sources, *sorted(headers)])}"
    folder.mkdir(parents=True, exist_ok=True)
    if sources == SOURCES:  # parsing the headers takes most of the time
        together = folder / "headers.h"
        together.write_text("".join(f'#include "tests/{header.name}"\n' for header in _HEADERS))
        _compile(together, folder / "headers.h.gch", [*command, "-x", "c++-header"])
        command = [*command, "-include", str(together)]
    objects = [folder / (source.stem + ".o") for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, target: _compile(source, target, command), sources, objects))
    programs = []
    for each in links:
        program = folder / f"aclnn_test_{_key([each], [Path(link) for link in each if link.endswith('.o')])}"
        if not program.exists():
            link = [*compiler, *map(str, objects), *each, "-o", str(program), "-pthread"]
            subprocess.run(link, check=True, capture_output=True, text=True, timeout=600)
        programs.append(program)
    return programs


def _key(texts: Sequence[object], files: Sequence[Path]) -> str:
    contents = [repr(texts).encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def _compile(source: Path, target: Path, command: list[str]) -> None:
    if target.exists():
        return
    werror = ["-Werror"] * (os.environ.get("HOST_NPU_WERROR") == "1")
    part = target.with_suffix(f".{os.getpid()}")
    command = [*command, "-std=c++20", "-O0", "-Wall", "-Wextra", *werror, "-c", str(source), "-o", str(part)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    part.rename(target)


def results(
    command: Sequence[str], configurations: Sequence[dict[str, str]] = CONFIGURATIONS, timeout: float = 300
) -> dict[str, list[str]]:
    """Run the program and return the result of each case.

    Args:
        command: The program, possibly with an emulator that runs it.
        configurations: The environment variables of each run.
        timeout: Seconds for each configuration.

    Returns:
        ``"ok"`` or the reason of the failure, for each configuration in which a case ran, by case name.
    """
    others = {name for configuration in CONFIGURATIONS for name in configuration}
    clean = {name: value for name, value in os.environ.items() if name not in others}
    said: dict[str, list[str]] = {}
    for configuration in configurations:
        run = subprocess.run(command, env=clean | configuration, capture_output=True, text=True, timeout=timeout)
        for status, name, why in re.findall(r"^(ok|FAILED) ([^\s:]+)(?:: (.*))?$", run.stdout, re.MULTILINE):
            said.setdefault(name, []).append(status if status == "ok" else f"{configuration}: {why}")
        has_ended = f"ok {LAST}\n" in run.stdout or f"FAILED {LAST}" in run.stdout
        # The exit status 1 means that a case failed. A sanitizer that finds an error at exit uses other statuses.
        if not has_ended or run.returncode != ("FAILED " in run.stdout):
            end = f"the program ended {'' if has_ended else 'early '}with {run.returncode}"
            said.setdefault(LAST, []).append(f"{configuration}: {end}\n{run.stderr}")
    return said
