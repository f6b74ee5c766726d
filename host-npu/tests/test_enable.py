"""Enabling the host NPU, and its libraries.

Programs run in new interpreters; this one has no NPU. Starting one takes seconds, so several tests share a program.
"""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import host_npu
import pytest
import torch
from host_npu import _libraries, testing

_TESTS = pathlib.Path(__file__).parent
_PACKAGE = pathlib.Path(host_npu.__file__).parents[1]


def _run(*arguments: str | pathlib.Path, **environment: str) -> subprocess.CompletedProcess[str]:
    removed = ("TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING", "ASCEND_HOME_PATH")
    kept = {
        name: value for name, value in os.environ.items() if name not in removed and not name.startswith("HOST_NPU_")
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**kept, "PYTHONPATH": os.pathsep.join([str(_PACKAGE), *sys.path[1:]]), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _on_host_npu(*arguments: str | pathlib.Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return _run("-m", "host_npu", *arguments, **environment)


@pytest.fixture
def script(tmp_path):
    """Return a function that writes code to a script."""

    def write(code: str) -> pathlib.Path:
        path = tmp_path / "script.py"
        path.write_text(code)
        return path

    return write


_PROGRAM = """
import json, os, subprocess, sys, threading, time
import torch

started = threading.Event()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return input * 2

    @staticmethod
    def backward(ctx, grad_output):
        started.set()
        time.sleep(1)
        return grad_output * 2


child = "import torch_npu, torch; torch.npu.set_device(0); torch.npu.set_device(1); "
child += "print(torch.npu.device_count(), torch.ones(3).npu().sum().item())"
result = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
facts = [sys.argv[1:], torch.npu.get_device_name(), os.environ["HOST_NPU_STRICT_MEMORY"]]
print(json.dumps([*facts, result.returncode, result.stdout, result.stderr]))
input = torch.ones(1, device="npu", requires_grad=True)
threading.Thread(target=lambda: Slow.apply(input).sum().backward(), daemon=True).start()
started.wait()
print("the end")
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """Return the result of a program run as a module, in an environment with its own sitecustomize."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "program.py").write_text(_PROGRAM)
    (folder / "sitecustomize.py").write_text("print('customized')")
    arguments = ("--devices", "2", "--soc", "Ascend310P", "--strict-memory", "-m", "program", "-x")
    return _on_host_npu(*arguments, PYTHONPATH=f"{folder}:{_PACKAGE}")


def test_a_module_gets_its_arguments_and_the_options_hold(module):
    assert json.loads(module.stdout.splitlines()[1])[:3] == [["-x"], "Ascend310P3", "1"], module.stderr


def test_a_child_that_imports_torch_npu_first_and_makes_two_devices_current_ends_with_0(module):
    *_, status, output, errors = json.loads(module.stdout.splitlines()[1])
    assert (status, output.splitlines()[1:]) == (0, ["2 3.0"]), errors


def test_a_sitecustomize_of_the_environment_runs_in_child_processes_too(module):
    first, facts, _ = module.stdout.splitlines()
    assert first == json.loads(facts)[4].splitlines()[0] == "customized"


def test_a_program_that_ends_during_a_backward_pass_does_not_abort(module):
    assert (module.returncode, module.stdout.splitlines()[-1]) == (0, "the end"), module.stderr


@pytest.fixture
def with_cann(tmp_path):
    """Return the environment of a machine with a real CANN."""
    (tmp_path / "libascendcl.so").touch()
    return {"LD_LIBRARY_PATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_a_real_cann_is_not_hidden(script, with_cann):
    result = _on_host_npu(script("print('ran')"), **with_cann)
    assert (result.returncode, result.stdout) == (2, "")
    assert "there is a real CANN (its libraries are on the loader's search path)" in result.stderr


def test_ascend_home_path_counts_as_a_real_cann(tmp_path, script):
    result = _on_host_npu(script(""), ASCEND_HOME_PATH=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert f"ASCEND_HOME_PATH is set to {tmp_path}" in result.stderr


def _enabled_here(device):
    sys.modules["torch_npu"] = None
    found = [host_npu.is_enabled()]
    host_npu.enable(devices=3)
    return [*found, host_npu.is_enabled(), torch.npu.device_count(), torch.ones(2, device="npu").sum().item()]


def test_a_program_can_enable_it_itself_although_torch_npu_was_blocked():
    assert testing.run(_enabled_here, 1, backend="") == [[False, True, 3, 2.0]]


def test_a_script_that_is_not_there_takes_one_line(tmp_path):
    result = _on_host_npu(tmp_path / "none.py")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert f"there is no file {tmp_path / 'none.py'}" in result.stderr


@pytest.mark.exhaustive
def test_the_runner_searches_where_python_does(tmp_path):
    (tmp_path / "where.py").write_text("import sys; print(sys.argv[1:], sys.path)")
    python = _run(tmp_path / "where.py", "-m")
    # torch_npu imports torch.distributed.nn of torch 2.9, which adds a folder at the end.
    assert _on_host_npu(tmp_path / "where.py", "-m").stdout.startswith(python.stdout.removesuffix("]\n"))
    module = _on_host_npu("--devices", "2", "-mwhere", "-m", PYTHONPATH=f"{_PACKAGE}:{tmp_path}")
    assert module.stdout.startswith("['-m'] ["), module.stderr


_CODE = """
import os, sys
print(sys.argv, sys.path, __name__, "__file__" in vars(sys.modules["__main__"]))
if "torch" in sys.modules:
    import torch, torch_npu
    swiglu = torch_npu.npu_swiglu(torch.ones(2, 8, device="npu"))
    from host_npu import testing
    processes = testing.run(str.upper, 1, device="npu", backend="")
    print(swiglu.sum().item(), torch.npu.device_count(), os.environ["ASCEND_HOME_PATH"], *processes)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Return the outputs of code run by Python and by the host NPU, and the path of a real CANN."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "libascendcl.so").touch()
    # torch mistakes the folder for the package and cannot import torch._dynamo, which formulas need for result shapes.
    (folder / "triton").mkdir()
    environment = {"PYTHONPATH": f"{_PACKAGE}:{folder}"}
    python = _run("-c", _CODE, "-m", "--soc", **environment)
    environment |= {"LD_LIBRARY_PATH": str(folder), "ASCEND_HOME_PATH": str(folder)}
    result = _on_host_npu("--force", "--devices", "2", f"-c{_CODE}", "-m", "--soc", **environment)
    assert result.returncode == 0, result.stderr
    return python.stdout, result.stdout, str(folder)


def test_code_runs_like_a_script(code):
    python, host_npu, _ = code
    before, after = python.split("]", 2)[:2], host_npu.split("]", 2)[:2]
    assert before[0] == after[0] == "['-c', '-m', '--soc'"
    assert after[1].startswith(before[1]) and before[1].startswith(" [''")
    assert host_npu.splitlines()[0].endswith("] __main__ False")


def test_a_folder_named_triton_is_not_the_package_and_a_real_cann_is_hidden_on_demand(code):
    _, host_npu, folder = code
    sum_of_swiglu, devices, home, process = host_npu.splitlines()[1].split()
    assert (sum_of_swiglu, devices) == ("5.848468780517578", "2") and home != folder
    assert process == "NPU"  # a process of host_npu.testing, in which the folder is hidden, too


def test_without_torch_npu_it_says_what_to_install(tmp_path):
    code = "import host_npu; from importlib.machinery import PathFinder\n"
    code += "PathFinder.find_spec = lambda *arguments: None; host_npu.enable()"
    assert "HostNpuError: the host NPU needs torch_npu, which is not installed" in _run("-c", code).stderr


def test_torch_npu_must_not_be_imported_before(tmp_path):
    (tmp_path / "torch_npu.py").touch()
    code = "import torch_npu, host_npu; host_npu.enable()"
    result = _run("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONPATH=f"{tmp_path}:{_PACKAGE}")
    assert "HostNpuError: torch_npu is imported already" in result.stderr


_DEVICES = ("HOST_NPU_DEVICES", "must be a whole number from 1 to 64")


@pytest.mark.skipif(host_npu.is_enabled(), reason="these tests run on a host NPU")
@pytest.mark.parametrize(
    ("variable", "rule", "value"),
    [
        *((*_DEVICES, value) for value in ("many", "0", "65", "", "٣")),
        ("HOST_NPU_SOC", f"must be one of {', '.join(host_npu.SOCS)}", "Foo"),
        ("HOST_NPU_STRICT_MEMORY", "must be 0 or 1", "yes"),
        ("HOST_NPU_DTYPES", "must be cann or torch", "all"),
    ],
)
def test_the_environment_is_checked(monkeypatch, variable, rule, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=re.escape(f"{variable} {rule}, got {value!r}")):
        host_npu.enable()


def test_the_runner_ends_with_what_is_wrong_in_the_environment(script):
    result = _on_host_npu(script(""), HOST_NPU_DEVICES="many")
    assert result.returncode == 2
    assert "HOST_NPU_DEVICES must be a whole number from 1 to 64, got 'many'" in result.stderr


@pytest.mark.parametrize("call", [host_npu.stats, host_npu.reset, lambda: host_npu.fail("aclrtMalloc")])
def test_statistics_need_it_enabled(call):
    if host_npu.is_enabled():
        pytest.skip("these tests run on a host NPU")
    with pytest.raises(host_npu.HostNpuError, match="is not enabled"):
        call()


def test_it_imports_nothing_of_the_operators():
    patterns = ("setup.py", "csrc/*.py", "host_npu/**/*.py", "tests/**/*.py")
    sources = [path for pattern in patterns for path in _TESTS.parent.glob(pattern)]
    imports = [
        line for path in sources for line in path.read_text().splitlines() if re.match(r"\s*(import|from) ", line)
    ]
    assert imports and not [line for line in imports if "torch_aclnn_ops" in line]


@pytest.fixture
def libraries(monkeypatch):
    """Return the libraries that csrc/build.py builds, in its order."""
    monkeypatch.syspath_prepend(_PACKAGE / "csrc")
    return importlib.import_module("build").libraries()


def test_every_library_that_is_built_is_loaded(libraries):
    assert sorted(_libraries.names()) == sorted(library.name for library in libraries)


def test_every_folder_of_sources_is_a_library_that_is_linked_with_those_before_it(libraries):
    folders = {file.parent.name for file in (_PACKAGE / "csrc").glob("*/*.cpp")}
    assert {library.name for library in libraries} == folders - {"tests"}
    for index, library in enumerate(libraries):
        assert set(library.links) <= {before.name for before in libraries[:index]}
