"""Device memory beyond the host's memory: a program gets an error before the kernel kills it.

The kernel's files about memory are replaced by those in a folder, so no test fills the machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20

# Answers each line of input in a forked process. The parent has imported torch and used no device.
_PROGRAM = """
import json, os, sys
import host_npu
host_npu.enable()
import torch

MIB = 1 << 20
for line in sys.stdin:
    root, environment, code = json.loads(line)
    if os.fork() == 0:
        os.environ.update(environment)
        host_npu._require_enabled().host_npu_read_limits_from(root.encode())
        answers = {}
        def write(name, text):
            with open(f"{root}/{name}", "w") as file:
                file.write(text)
        exec(code)
        print(json.dumps(answers), flush=True)
        os._exit(0)
    if os.wait()[1] != 0:
        print("{}", flush=True)
"""


_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HOST_NPU_")}


@pytest.fixture(scope="module")
def program():
    """Return the program, which is started once."""
    environment = _ENVIRONMENT | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], env=environment, **pipes) as started:
        yield started
        started.stdin.close()


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _machine(total: int, available: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {total << 10} kB\nMemFree: 1 kB\nMemAvailable: {available << 10} kB\n"}


def _container(limit: int | str, used: int, active: int = 0, inactive: int = 0) -> dict[str, str]:
    folder = "sys/fs/cgroup"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\nactive_file {active}\ninactive_file {inactive}\n",
    }


@pytest.fixture
def run(program, tmp_path):
    """Return a function that runs code in a process whose host limits are read from files, and returns its answers."""

    def answers(files: dict[str, str], code: str, **environment: str) -> dict[str, object]:
        _write(tmp_path, files)
        program.stdin.write(json.dumps([str(tmp_path), environment, code]) + "\n")
        program.stdin.flush()
        return json.loads(next(line for line in program.stdout if line.startswith("{")))

    return answers


_INFO = """
free, total = torch.npu.mem_get_info()
answers.update(free=free // MIB, total=total // MIB, properties=torch.npu.get_device_properties(0).total_memory // MIB)
"""


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        (_machine(8192, 4096), 8192, 4096 - 512),
        (_machine(1 << 20, 1 << 19), 65536, 65536),
        (_machine(8192, 100), 8192, 0),
        (_machine(8192, 4096) | _container(2048 * MIB, 1024 * MIB, 100 * MIB, 24 * MIB), 2048, 1024 + 124 - 128),
        (_machine(8192, 4096) | _container("max", 1), 8192, 4096 - 512),
    ],
    ids=["machine", "huge", "full", "container", "no limit"],
)
def test_the_memory_is_that_of_the_machine_or_the_container(files, total, free, run):
    answers = run(files, _INFO)
    assert answers == {"total": total, "free": free, "properties": total}


_TWO_DEVICES = """
import ctypes, sys
import host_npu
host_npu._prepare(host_npu._settings(2, None, None), force=False)
runtime, (free, total) = host_npu._require_enabled(), (ctypes.c_size_t(), ctypes.c_size_t())
runtime.host_npu_read_limits_from(sys.argv[1].encode())
HIGH_BANDWIDTH = 1
for status in (runtime.aclInit(None), runtime.aclrtSetDevice(1),
               runtime.aclrtGetMemInfo(HIGH_BANDWIDTH, ctypes.byref(free), ctypes.byref(total))):
    assert status == 0, status
print(total.value >> 20, free.value >> 20)
"""


def test_devices_share_the_memory_of_the_machine(tmp_path):
    _write(tmp_path, _machine(8192, 4096))
    command = [sys.executable, "-c", _TWO_DEVICES, str(tmp_path)]
    result = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, text=True)
    assert result.stdout == f"4096 {4096 - 512}\n", result.stderr


@pytest.mark.parametrize("segments", ["", "expandable_segments:True"])
def test_memory_that_the_host_does_not_have_is_an_error(segments, run):
    code = """
kept = [torch.ones(64 * MIB, dtype=torch.uint8, device="npu")]
answers["filled"] = torch.empty(16 * MIB, device="npu").isnan().all().item()
torch.npu.empty_cache()
total = torch.npu.mem_get_info()[1]
for name, size, available in ("large", 64, 10), ("small", 32, 40):
    write("proc/meminfo", f"MemTotal: {8192 << 10} kB\\nMemAvailable: {(512 + available) << 10} kB\\n")
    try:
        kept.append(torch.empty(size * MIB, dtype=torch.uint8, device="npu"))
        answers[name] = "allocated"
    except torch.OutOfMemoryError as error:
        answers[name] = "refused"
        answers["message"] = str(error)
write("proc/meminfo", f"MemTotal: {8192 << 10} kB\\nMemAvailable: {4096 << 10} kB\\n")
kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device="npu"))
torch.npu.synchronize()
kept.clear()
torch.npu.synchronize()
torch.npu.empty_cache()
answers["released"] = host_npu.stats().device_bytes[0] < 8 * MIB
answers["constant"] = torch.npu.mem_get_info()[1] == total
"""
    answers = run(_machine(8192, 4096), code, PYTORCH_NPU_ALLOC_CONF=segments)
    assert "NPU out of memory" in str(answers.pop("message"))
    assert answers == {"filled": True, "large": "refused", "small": "allocated", "released": True, "constant": True}


def test_a_capture_copies_no_more_than_the_host_has(run):
    code = """
x, graph = torch.ones(64 * MIB, dtype=torch.uint8, device="npu"), torch.npu.NPUGraph()
x.add(1)
torch.npu.synchronize()
write("proc/meminfo", f"MemTotal: {8192 << 10} kB\\nMemAvailable: {(512 + 32) << 10} kB\\n")
try:
    with torch.npu.graph(graph):
        x.add_(1)
except RuntimeError as error:
    answers["error"] = str(error)
"""
    answers = run(_machine(8192, 4096), code)
    assert "the host is out of memory: " in str(answers["error"])


def test_memory_that_linux_refuses_is_an_error(run):
    code = """
import resource
x = torch.ones(MIB, device="npu")
limits = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (1 * MIB, limits[1]))
try:
    torch.empty(64 * MIB, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError:
    answers["large"] = "refused"
resource.setrlimit(resource.RLIMIT_DATA, limits)
torch.npu.empty_cache()
answers["bytes"] = host_npu.stats().device_bytes[0] // MIB
"""
    answers = run(_machine(8192, 4096), code, HOST_NPU_MEMORY="1024")
    assert answers["large"] == "refused" and answers["bytes"] < 64


def test_memory_that_is_set_is_not_compared_with_the_hosts(run):
    answers = run(
        _machine(8192, 10),
        _INFO + "torch.empty(64 * MIB, dtype=torch.uint8, device='npu')",
        HOST_NPU_MEMORY="100000",
    )
    assert answers == {"total": 100000, "free": 100000, "properties": 100000}


def test_a_host_that_does_not_say_what_it_has_is_not_full(run):
    answers = run({}, _INFO + "torch.empty(64 * MIB, dtype=torch.uint8, device='npu')")
    assert answers["total"] == answers["free"] != 0
