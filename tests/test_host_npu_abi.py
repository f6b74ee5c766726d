"""The simulated operators through CANN's C interface alone: a C++ program of test cases, one test each.

The program sees the headers of the wheel and of ``csrc/host_npu/include`` and links the simulated libraries. A case
says on which chips it runs; the program is run once for each, and once without the cache of phase one.
"""

import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops import _torch_npu, host_npu
from torch_aclnn_ops.host_npu import _libraries

import pytest

_REPOSITORY = Path(__file__).resolve().parents[1]
_HOST_NPU = _REPOSITORY / "csrc" / "host_npu"
_SOURCES = sorted((_HOST_NPU / "tests").glob("*.cpp"))
_LIBRARIES = Path(torch_aclnn_ops.__file__).parent / "_host_npu"
_LAST = "nothing_is_alive_at_the_end"

_CONFIGURATIONS = [{"TORCH_ACLNN_HOST_NPU_SOC": soc} for soc in host_npu.SOCS]
_CONFIGURATIONS += [{"DISABLE_L2_CACHE": "1"}, {"ACLNN_CACHE_LIMIT": "0"}]

pytestmark = pytest.mark.skipif(
    bool(_libraries.missing()) or shutil.which("g++") is None, reason="the host NPU was not built, or there is no g++"
)


def _names() -> list[str]:
    cases = re.compile(r"const Case \w+\{\s*\"([^\"]+)\"")
    return [name for source in _SOURCES for name in cases.findall(source.read_text())]


def _compile(source: Path, to: Path, flags: list[str]) -> Path:
    result = to / (source.stem + ".o")
    werror = ["-Werror"] * (os.environ.get("TORCH_ACLNN_WERROR") == "1")
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", *werror, *flags, "-c", str(source), "-o", str(result)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    return result


@pytest.fixture(scope="module")
def program() -> Path:
    """The path of the compiled program, which is kept until a source of it changes."""
    include = _torch_npu.library().parents[1] / "include"
    flags = [f"-I{_HOST_NPU}", f"-I{_HOST_NPU / 'include'}", "-isystem", str(include / "third_party" / "acl" / "inc")]
    flags += ["-isystem", str(include)]
    sources = [*_SOURCES, *(_HOST_NPU / "tests").glob("*.h"), *(_HOST_NPU / "include").rglob("*.h")]
    contents = [str(_LIBRARIES).encode(), *(file.read_bytes() for file in sorted(sources))]
    content = hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
    folder = _REPOSITORY / "build" / "host_npu" / f"abi-{content}"
    program = folder / "aclnn_test"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: str(_compile(source, folder, flags)), _SOURCES))
        link = ["g++", *objects, "-o", str(program), f"-L{_LIBRARIES}", "-lopapi", "-lnnopbase", "-lascendcl"]
        link += [f"-Wl,-rpath,{_LIBRARIES}", "-pthread"]
        subprocess.run(link, check=True, capture_output=True, text=True, timeout=100)
    return program


@pytest.fixture(scope="module")
def results(program: Path) -> dict[str, list[str]]:
    """What the program said of each case: ``"ok"`` or why it failed, once for each configuration that it ran in."""
    said: dict[str, list[str]] = {}
    for configuration in _CONFIGURATIONS:
        others = {name for other in _CONFIGURATIONS for name in other}
        clean = {name: value for name, value in os.environ.items() if name not in others}
        run = subprocess.run([program], env=clean | configuration, capture_output=True, text=True, timeout=300)
        for status, name, why in re.findall(r"^(ok|FAILED) ([^\s:]+)(?:: (.*))?$", run.stdout, re.MULTILINE):
            said.setdefault(name, []).append(status if status == "ok" else f"{configuration}: {why}")
        if f"{_LAST}\n" not in run.stdout and f"FAILED {_LAST}" not in run.stdout:
            said.setdefault(_LAST, []).append(
                f"{configuration}: the program ended early with {run.returncode}\n{run.stderr}"
            )
    return said


@pytest.mark.parametrize("name", [*_names(), _LAST])
def test_case(name: str, results: dict[str, list[str]]):
    said = results.get(name, ["it did not run"])
    assert set(said) == {"ok"}, "\n".join(said)
