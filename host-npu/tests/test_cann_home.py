"""The folder that programs accept as a CANN toolkit, its npu-smi, and processes around the host NPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).resolve().parents[1]
_OTHERS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "HOST_NPU_ENABLE")
_EXTENSION = """
#include <acl/acl.h>
#include <aclnn/aclnn_base.h>
#include <aclnn/opdev/fp16_t.h>
#include <aclnnop/aclnn_mse_loss_backward.h>
#include <aclnnop/aclnn_swi_glu.h>
#include <hccl/hccl.h>
extern "C" unsigned int devices() { unsigned int count = 0; return aclrtGetDeviceCount(&count) == 0 ? count : 99; }
extern "C" int phase_one() {
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    return aclnnMseLossBackwardGetWorkspaceSize(nullptr, nullptr, nullptr, 0, nullptr, &size, &executor);
}
"""


def _run(code: str, **variables: str) -> str:
    """Run code in a process that has a host NPU from the start, and imports torch only if the code does."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHERS}
    paths = os.pathsep.join([str(_PACKAGE / "host_npu" / "_children"), str(_PACKAGE)])
    environment = inherited | {"PYTHONPATH": paths, "HOST_NPU_ENABLE": "1", "HOST_NPU_DEVICES": "2"} | variables
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_variables_name_folders_that_are_there_in_children_too():
    code = f"import os; print(all(os.path.isdir(os.environ[name]) for name in {_OTHERS[:3]}))"
    child = f"import subprocess, sys; {code}; sys.stdout.flush(); subprocess.run([sys.executable, '-c', {code!r}])"
    assert _run(child) == "True\nTrue\n"


def test_its_own_folder_and_one_that_is_not_there_are_no_real_cann(tmp_path):
    code = "import os, host_npu; print(host_npu.is_enabled(), os.environ['ASCEND_HOME_PATH'])"
    first = _run(code)
    _, home = first.split()
    for folder in (home, str(tmp_path / "none")):
        assert _run(code, ASCEND_HOME_PATH=folder) == first == f"True {home}\n"


def test_the_folder_is_in_the_temporary_one_if_there_is_no_cache(tmp_path):
    (tmp_path / "file").touch()
    code = "import os; print(os.environ['ASCEND_HOME_PATH'].startswith(os.environ['TMPDIR']))"
    assert _run(code, XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path)) == "True\n"


def _npu_smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HOST_NPU_DEVICES": "3", "HOST_NPU_SOC": "Ascend950", "HOST_NPU_MEMORY": "500"}
    command = [sys.executable, _PACKAGE / "host_npu" / "_npu_smi.py", "info", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "| 2 950 | OK | NA NA NA |"),
        ([], "| 0 | NA | NA 0 / 0 0 / 500 |"),
        (["-l"], "Total Count : 3"),
        (["-m"], "2 0 2 Ascend 950"),
        (["-t", "board", "-i", "2"], "Chip Name : 950"),
        (["-t", "usages", "-i", "1", "-c", "0"], "HBM Usage Rate(%) : 0"),
        (["-t", "memory"], "HBM Capacity(MB) : 500"),
        (["-t", "common", "-i", "1"], "HBM Usage Rate(%) : 0"),
        (["-t", "topo"], "NPU0 NPU1 NPU2 CPU Affinity"),
    ],
    ids=str,
)
def test_npu_smi_shows_the_simulated_devices(arguments, line):
    assert line in [" ".join(each.split()) for each in _npu_smi(*arguments).stdout.splitlines()]


def test_npu_smi_shows_the_links_of_the_devices_and_the_processors_near_to_them():
    rows = [line.split() for line in _npu_smi("-t", "topo").stdout.splitlines()[1:]]
    assert [row[:4] for row in rows] == [
        ["NPU0", "X", "HCCS", "HCCS"],
        ["NPU1", "HCCS", "X", "HCCS"],
        ["NPU2", "HCCS", "HCCS", "X"],
    ]
    ranges = [map(int, part.split("-")) for part in rows[0][4].split(",")]
    assert {cpu for begin, end in ranges for cpu in range(begin, end + 1)} == os.sched_getaffinity(0)


def test_packages_of_the_toolkit_have_versions():
    code = "import os; print(*(open(os.environ['ASCEND_HOME_PATH'] + path).readline() for path in {}), sep='')"
    paths = [f"/{name}/version.info" for name in ("opp", "compiler")]
    assert _run(code.format(paths)) == "Version=9.1.0\n" * 2 + "\n"


def test_npu_smi_refuses_a_device_that_is_not_there():
    assert "argument -i: invalid choice: 3 (choose from 0, 1, 2)" in _npu_smi("-t", "board", "-i", "3").stderr


def test_npu_smi_is_found_by_programs_and_counts_their_devices():
    shown = _run("import subprocess; subprocess.run(['npu-smi', 'info', '-l'], check=True)")
    assert shown.split()[:4] == ["Total", "Count", ":", "2"]


def test_an_extension_compiled_at_run_time_builds_loads_and_runs(tmp_path):
    (tmp_path / "extension.cpp").write_text(_EXTENSION)
    code = f"""
import ctypes, os, subprocess
home = os.environ["ASCEND_HOME_PATH"]
subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "extension.cpp", "-o", "extension.so", f"-I{{home}}/include",
                f"-L{{home}}/lib64", "-lopapi", "-lascendcl"], check=True, cwd={str(tmp_path)!r})
extension = ctypes.CDLL({str(tmp_path / "extension.so")!r})
print(extension.devices(), extension.phase_one())
"""
    assert _run(code) == "2 161001\n"  # 161001: null pointer


def test_another_interpreter_starts_without_the_host_npu(tmp_path):
    children = _PACKAGE / "host_npu" / "_children"
    environment = {"PYTHONPATH": str(children), "HOST_NPU_ENABLE": "1"}
    command = [sys.executable, "-c", "print('ran')"]
    # An interpreter without the environment's packages.
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    command[0] = str(tmp_path / "bin" / "python")
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (result.stdout, result.stderr) == ("ran\n", "")
