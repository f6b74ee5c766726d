"""The C++ program of the simulated operators' test cases: compiled, and run once for each configuration."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from torch_aclnn_ops import host_npu

REPOSITORY = Path(__file__).resolve().parents[1]
LAST = "nothing_is_alive_at_the_end"

_HOST_NPU = REPOSITORY / "csrc" / "host_npu"
_SOURCES = sorted((_HOST_NPU / "tests").glob("*.cpp"))
CONFIGURATIONS = [{"TORCH_ACLNN_HOST_NPU_SOC": soc} for soc in host_npu.SOCS]
CONFIGURATIONS += [{"DISABLE_L2_CACHE": "1"}, {"ACLNN_CACHE_LIMIT": "0"}]
CONFIGURATIONS += [{"TORCH_ACLNN_HOST_NPU_STRICT_MEMORY": "1"}]


def build_script(repository: Path) -> ModuleType:
    """Load csrc/host_npu/build.py of a copy of the repository."""
    spec = importlib.util.spec_from_file_location("host_npu_build", repository / "csrc" / "host_npu" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def names() -> list[str]:
    """Return the names of the cases."""
    cases = re.compile(r"const Case \w+\{\s*\"([^\"]+)\"")
    return [name for source in _SOURCES for name in cases.findall(source.read_text())]


def shared(libraries: Path) -> list[str]:
    """Return how to link the program with the host NPU's libraries in a folder."""
    return [f"-L{libraries}", "-lopapi", "-lnnopbase", "-lascendcl", f"-Wl,-rpath,{libraries}"]


def compiled(compiler: Sequence[str], torch_npu: Path, links: Sequence[Sequence[str]]) -> list[Path]:
    """Return the paths of the compiled program, which is kept until something that it is made of changes.

    Args:
        compiler: The command of the C++ compiler.
        torch_npu: The folder of the package torch_npu, for the headers in it.
        links: What each of the programs is linked with.
    """
    include = torch_npu / "include"
    flags = [f"-I{_HOST_NPU}", f"-I{_HOST_NPU / 'include'}", "-isystem", str(include / "third_party" / "acl" / "inc")]
    command = [*compiler, *flags, "-isystem", str(include)]
    sources = [*_SOURCES, *(_HOST_NPU / "tests").glob("*.h"), *(_HOST_NPU / "include").rglob("*.h")]
    inputs = sorted(sources) + [Path(link) for each in links for link in each if link.endswith(".o")]
    contents = [repr([command, *links]).encode(), *(file.read_bytes() for file in inputs)]
    content = hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
    folder = REPOSITORY / "build" / "host_npu" / f"abi-{content}"
    programs = [folder / f"aclnn_test_{index}" for index in range(len(links))]
    if not all(program.exists() for program in programs):
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: _compiled_source(source, folder, command), _SOURCES))
        for program, each in zip(programs, links, strict=True):
            link = [*compiler, *objects, *each, "-o", str(program), "-pthread"]
            subprocess.run(link, check=True, capture_output=True, text=True, timeout=600)
    return programs


def _compiled_source(source: Path, folder: Path, command: list[str]) -> str:
    result = folder / (source.stem + ".o")
    werror = ["-Werror"] * (os.environ.get("TORCH_ACLNN_WERROR") == "1")
    command = [*command, "-std=c++20", "-O1", "-Wall", "-Wextra", *werror, "-c", str(source), "-o", str(result)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    return str(result)


def results(
    command: Sequence[str], configurations: Sequence[dict[str, str]] = CONFIGURATIONS, timeout: float = 300
) -> dict[str, list[str]]:
    """Run the program; return what it said of each case.

    Args:
        command: The program, and what runs it if the machine does not.
        configurations: The environment variables of each run.
        timeout: Seconds for each configuration.

    Returns:
        ``"ok"`` or why a case failed, once for each configuration that it ran in, by the case's name.
    """
    others = {name for configuration in CONFIGURATIONS for name in configuration}
    clean = {name: value for name, value in os.environ.items() if name not in others}
    said: dict[str, list[str]] = {}
    for configuration in configurations:
        run = subprocess.run(command, env=clean | configuration, capture_output=True, text=True, timeout=timeout)
        for status, name, why in re.findall(r"^(ok|FAILED) ([^\s:]+)(?:: (.*))?$", run.stdout, re.MULTILINE):
            said.setdefault(name, []).append(status if status == "ok" else f"{configuration}: {why}")
        if f"{LAST}\n" not in run.stdout and f"FAILED {LAST}" not in run.stdout:
            end = f"the program ended early with {run.returncode}"
            said.setdefault(LAST, []).append(f"{configuration}: {end}\n{run.stderr}")
    return said
