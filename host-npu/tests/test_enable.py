"""The simulated NPU: its devices, memory, streams, statistics, and how it is switched on.

Every program runs in a process of its own; this one has no NPU.
"""

import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import host_npu
import pytest
from host_npu import _libraries
from tests._output import read_json

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


def _json(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return read_json(result.stdout)


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What a program found out about two devices."""
    # Complex matrices are multiplied, which a device refuses.
    settings = {"HOST_NPU_DTYPES": "torch"}
    return _json(_on_host_npu("--devices", "2", _TESTS / "facts.py", "first", "--second", **settings))


@pytest.fixture
def script(tmp_path):
    """Make a script of some code."""

    def write(code: str) -> pathlib.Path:
        path = tmp_path / "script.py"
        path.write_text(code)
        return path

    return write


# How it is switched on.


def test_a_script_gets_its_arguments(facts):
    assert facts["arguments"] == ["first", "--second"]


def test_a_module_runs_like_a_script(tmp_path):
    (tmp_path / "program.py").write_text(
        "import os, sys, torch\nprint(sys.argv[1:], torch.npu.get_device_name(), os.environ['HOST_NPU_STRICT_MEMORY'])"
    )
    arguments = ("--soc", "Ascend310P", "--strict-memory", "-m", "program", "-x")
    result = _on_host_npu(*arguments, PYTHONPATH=f"{_PACKAGE}:{tmp_path}")
    assert result.stdout.split("\n")[-2] == "['-x'] Ascend310P3 1", result.stderr


def test_torch_npu_says_nothing_about_the_missing_cann(script):
    assert _on_host_npu(script("")).stdout == ""


@pytest.fixture
def with_cann(tmp_path):
    """The environment of a machine that has a real CANN."""
    (tmp_path / "libascendcl.so").touch()
    return {"LD_LIBRARY_PATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_a_real_cann_is_not_hidden(script, with_cann):
    result = _on_host_npu(script("print('ran')"), **with_cann)
    assert (result.returncode, result.stdout) == (2, "")
    assert "there is a real CANN (its libraries are on the loader's search path)" in result.stderr


def test_a_real_cann_is_hidden_on_demand(tmp_path, script, with_cann):
    code = f"import os, torch; print(torch.npu.device_count(), os.environ['ASCEND_HOME_PATH'] == {str(tmp_path)!r})"
    result = _on_host_npu("--force", script(code), ASCEND_HOME_PATH=str(tmp_path), **with_cann)
    assert result.stdout == "1 False\n", result.stderr


def test_ascend_home_path_counts_as_a_real_cann(tmp_path, script):
    result = _on_host_npu(script(""), ASCEND_HOME_PATH=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert f"ASCEND_HOME_PATH is set to {tmp_path}" in result.stderr


def test_a_program_can_enable_it_itself():
    code = (
        "import host_npu; print(host_npu.is_enabled()); host_npu.enable(devices=3)\n"
        "import torch; print(host_npu.is_enabled(), torch.npu.device_count(), torch.ones(2, device='npu').sum().item())"
    )
    result = _run("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.stdout.split("\n")[-3:-1] == ["False", "True 3 2.0"], result.stderr


@pytest.fixture
def spawning(script):
    """A script that starts processes, which use devices."""
    return script(
        "import torch.multiprocessing\n"
        "import torch\n"
        "def work(rank, queue):\n"
        "    queue.put((torch.npu.mem_get_info()[0] > 0, torch.full((2,), rank, device=f'npu:{rank}').sum().item()))\n"
        "if __name__ == '__main__':\n"
        "    queue = torch.multiprocessing.get_context('spawn').SimpleQueue()\n"
        "    torch.multiprocessing.spawn(work, (queue,), nprocs=2)\n"
        "    print(sorted(queue.get() for _ in range(2)))\n"
    )


def test_spawned_processes_have_host_npus_too(spawning):
    result = _on_host_npu("--devices", "2", spawning)
    # They ask for free memory first, before there is a context on any device.
    assert result.stdout == "[(True, 0), (True, 2)]\n", result.stderr


def test_processes_that_a_program_starts_have_host_npus_too(script):
    child = script("import torch; print(torch.npu.device_count(), torch.npu.mem_get_info()[0] > 0)")
    code = f"import subprocess, sys; subprocess.run([sys.executable, {str(child)!r}])"
    program = child.with_name("parent.py")
    program.write_text(code)
    assert _on_host_npu("--devices", "2", program).stdout == "2 True\n"


def test_a_sitecustomize_of_the_environment_runs_in_child_processes(tmp_path, script):
    (tmp_path / "sitecustomize.py").write_text("print('customized')")
    program = script("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)'])")
    result = _on_host_npu(program, PYTHONPATH=f"{tmp_path}:{_PACKAGE}")
    # The parent's line comes before or after the child's, as its output is flushed.
    assert sorted(result.stdout.splitlines()) == ["1", "customized", "customized"], result.stderr


def test_a_script_that_is_not_there_takes_one_line(tmp_path):
    result = _on_host_npu(tmp_path / "none.py")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert f"there is no file {tmp_path / 'none.py'}" in result.stderr


@pytest.mark.exhaustive
def test_the_runner_searches_where_python_does(tmp_path):
    (tmp_path / "where.py").write_text("import sys; print(sys.argv[1:], sys.path)")
    python = _run(tmp_path / "where.py", "-m")
    # torch.distributed.nn of torch 2.9, which torch_npu imports, adds a folder at the end.
    assert _on_host_npu(tmp_path / "where.py", "-m").stdout.startswith(python.stdout.removesuffix("]\n"))
    module = _on_host_npu("--devices", "2", "-mwhere", "-m", PYTHONPATH=f"{_PACKAGE}:{tmp_path}")
    assert module.stdout.startswith("['-m'] ["), module.stderr


def test_a_folder_named_triton_is_not_the_package(tmp_path):
    # torch takes it for the package, and cannot import torch._dynamo, which the shapes of a formula's results need.
    (tmp_path / "triton").mkdir()
    code = "import torch, torch_npu; x = torch.ones(2, 8, device='npu'); print(torch_npu.npu_swiglu(x).sum().item())"
    result = _on_host_npu("-c", code, PYTHONPATH=f"{_PACKAGE}:{tmp_path}")
    assert result.stdout == "5.848468780517578\n", result.stderr


@pytest.mark.parametrize("option", [("-c",), ()], ids=["-c CODE", "-cCODE"])
def test_code_runs_like_a_script(option):
    code = "import sys; print(sys.argv, sys.path, __name__, '__file__' in vars(sys.modules['__main__']))"
    arguments = [*option, code, "-m", "--soc"] if option else [f"-c{code}", "-m", "--soc"]
    python, result = _run(*arguments), _on_host_npu("--devices", "2", *arguments)
    before, after = python.stdout.split("]", 2)[:2], result.stdout.split("]", 2)[:2]
    assert before[0] == after[0] == "['-c', '-m', '--soc'", result.stderr
    assert after[1].startswith(before[1]) and before[1].startswith(" [''")
    assert result.stdout.endswith("] __main__ False\n")


def test_without_torch_npu_it_says_what_to_install(tmp_path):
    code = "import host_npu; from importlib.machinery import PathFinder\n"
    code += "PathFinder.find_spec = lambda *arguments: None; host_npu.enable()"
    assert "HostNpuError: the host NPU needs torch_npu, which is not installed" in _run("-c", code).stderr


def test_a_torch_npu_that_was_blocked_is_imported():
    code = "import sys; sys.modules['torch_npu'] = None\nimport torch, host_npu; host_npu.enable()\n"
    code += "print(torch.ones(2, device='npu').sum().item())"
    assert _run("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.endswith("2.0\n")


def test_torch_npu_must_not_be_imported_before(tmp_path):
    (tmp_path / "torch_npu.py").touch()
    code = "import torch, torch_npu; import host_npu; host_npu.enable()"
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


def test_what_cannot_be_is_refused(facts):
    assert facts["invalid_requests"] == [
        *(
            "ValueError: function must be one of CANN's, such as aclnnRmsNormGetWorkspaceSize, got"
            f" {name!r}; did you mean {nearest}? count_calls() finds those that a program calls"
            for name, nearest in {"npu_rms_norm": "aclnnRmsNorm", "malloc": "aclrtMalloc"}.items()
        ),
        "TypeError: nth must be of type int, got 1.5",
        "TypeError: status must be of type int, got 'x'",
        "TypeError: message must be of type str, got 7",
        "ValueError: nth must be at least 1, got 0",
        "ValueError: status must not be 0, which is success",
        "ValueError: devices must be a whole number from 1 to 64, got 0",
        "TypeError: devices must be a whole number from 1 to 64, got '2'",
        "TypeError: devices must be a whole number from 1 to 64, got True",
        f"ValueError: soc must be one of {', '.join(host_npu.SOCS)}, got 'Ascend1'",
        f"TypeError: soc must be one of {', '.join(host_npu.SOCS)}, got 1",
        "TypeError: strict_memory must be True or False, got 1",
        "HostNpuError: the host NPU is enabled with HOST_NPU_DEVICES=2, and cannot be changed to 3: start the program"
        " with HOST_NPU_DEVICES=3, or enable the host NPU once",
        "HostNpuError: the host NPU is enabled with HOST_NPU_STRICT_MEMORY=0, and cannot be changed to 1: start the"
        " program with HOST_NPU_STRICT_MEMORY=1, or enable the host NPU once",
    ]


@pytest.mark.parametrize("call", [host_npu.stats, host_npu.reset, lambda: host_npu.fail("aclrtMalloc")])
def test_statistics_need_it_enabled(call):
    if host_npu.is_enabled():
        pytest.skip("these tests run on a host NPU")
    with pytest.raises(host_npu.HostNpuError, match="is not enabled"):
        call()


# Devices and memory.


def test_there_are_as_many_devices_as_asked_for(facts):
    assert facts["devices"] == {"count": 2, "device": "npu:1", "total": 6.0}


def test_a_device_that_is_not_there_is_refused_with_how_to_get_it(facts):
    expected = "there is no device 2: the host NPU has 2, numbered from 0; HOST_NPU_DEVICES or --devices sets how many"
    assert expected in facts["device_that_is_not_there"]


def test_tensors_move_between_devices(facts):
    assert facts["copy_between_devices"] == [0, 1, 2, 3]


def test_views_are_copied_between_devices(facts):
    rows = [[0, 1, 2], [3, 4, 5]]
    assert facts["copies_of_views_between_devices"] == [[[0, 3], [1, 4], [2, 5]], [[0, 2], [3, 5]], rows, rows]


def test_operands_have_to_be_on_one_device(facts):
    assert "found at least two devices, npu:0 and npu:1" in facts["operands_on_two_devices"]
    assert "found at least two devices, npu:0 and cpu" in facts["operands_on_device_and_host"]


def test_only_indices_may_be_the_hosts(facts):
    tensor, rows, values = facts["operands_of_an_index"]
    assert "found at least two devices, npu:0 and cpu" in tensor
    assert rows == [1]
    assert "found at least two devices, npu:0 and cpu" in values


def test_the_host_cannot_read_device_memory(script):
    code = "import ctypes, torch; ctypes.string_at(torch.ones(1, device='npu').data_ptr(), 4)"
    result = _on_host_npu(script(code))
    assert result.returncode == -signal.SIGSEGV
    assert "host NPU: the host touched device memory, which only copies and kernels may access" in result.stderr


@pytest.mark.exhaustive
def test_the_host_cannot_write_device_memory(script):
    code = "import ctypes, torch; ctypes.memset(torch.ones(1, device='npu').data_ptr(), 0, 4)"
    assert _on_host_npu(script(code)).returncode == -signal.SIGSEGV


def test_fresh_memory_holds_no_numbers(facts):
    assert facts["fresh_memory"] is True


def test_memory_is_limited(facts):
    assert facts["out_of_memory"].startswith("NPU out of memory")


# Streams, events and errors.


def test_streams_are_asynchronous(facts):
    assert facts["stream_is_asynchronous"] == [False, True]


def test_work_on_a_stream_is_done_in_order(facts):
    assert facts["stream_is_ordered"] == [0.0, 1.0]


def test_a_result_waits_for_what_still_uses_its_memory(facts):
    assert facts["memory_that_another_thread_has_freed"] is True


def test_threads_may_share_a_stream(facts):
    assert facts["threads_on_one_stream"] == []


def test_an_event_is_reached_with_the_work_before_it(facts):
    assert facts["event_waits_for_its_stream"] == [False, True]


def test_a_stream_waits_for_an_event_of_another(facts):
    assert facts["stream_waits_for_an_event"] == [False, True]


def test_events_measure_time(facts):
    assert facts["elapsed_time"] >= 40


def test_only_events_with_timing_measure_time(facts):
    status, message = facts["elapsed_time_of_an_event_without_timing"]
    assert status == 107006
    assert "was created without ACL_EVENT_TIME_LINE" in message


def test_a_fault_is_reported_once_by_the_next_synchronisation(facts):
    first, second = facts["fault_on_a_stream"]
    assert "error code is 507015" in first
    assert "aclrtMemsetAsync failed on stream" in first
    assert "is not live device memory" in first
    assert second == ""


def test_a_message_is_there_until_it_is_read(facts):
    nothing, status, message, afterwards = facts["message_is_read_once"]
    assert (nothing, status, afterwards) == (None, 107000, None)
    assert message == "EZ1001: aclrtFree: 0x1000 is not the start of memory from aclrtMalloc"


@pytest.mark.parametrize("soc", ["Ascend910", "Ascend310P"])
def test_torch_npus_initialization_leaves_no_message(soc):
    code = "import ctypes, torch; torch.ones(2).npu(); read = ctypes.CDLL(None).aclGetRecentErrMsg\n"
    code += "read.restype = ctypes.c_char_p; print(read())"
    assert _on_host_npu("--soc", soc, "-c", code).stdout.endswith("None\n")


def test_a_message_belongs_to_its_thread(facts):
    assert facts["message_belongs_to_its_thread"] == [None, True]


def test_callbacks_run_in_the_thread_that_subscribed(facts):
    assert facts["callback_runs_in_the_thread_that_subscribed"] is True


# Operators that the CPU computes.


def test_random_numbers_follow_the_npus_own_generator(facts):
    expected = {name: True for name in ("the host's are untouched", "they differ", "a state repeats them")}
    assert facts["random_numbers"] == {**expected, "dropout": [0.0, 2.0]}


def test_a_generator_can_be_given(facts):
    assert facts["generator"] is True


def test_a_generator_of_the_host_is_refused(facts):
    assert "Expected a 'npu' device type for generator but found 'cpu'" in facts["generator_of_the_host"]


def test_a_result_can_go_to_a_tensor_that_has_to_grow(facts):
    product = [[5.0, 14.0], [14.0, 50.0]]
    assert facts["results_in_given_tensors"] == [True, product, product]


def test_autocast_chooses_the_dtype(facts):
    assert facts["autocast"] == "torch.bfloat16"


@pytest.mark.parametrize("what", ["foreach_optimizer", "fused_optimizer", "convolution", "attention"])
def test_results_and_gradients_are_the_cpus(facts, what):
    assert facts[what] is True


@pytest.mark.parametrize("what", ["kernels_that_torch_npu_derives", "recurrent_networks", "conjugates_and_transforms"])
def test_results_and_gradients_are_close_to_the_cpus(facts, what):
    assert facts[what] is True


def test_tensors_of_zeros_without_memory_are_numbers_too(facts):
    assert facts["zero_tensors"] == [True, [1.0, 1.0]]


_TRAINING = {
    "no queue": {"TASK_QUEUE_ENABLE": "0"},
    "a queue": {"TASK_QUEUE_ENABLE": "1"},
    "a queue for both phases": {"TASK_QUEUE_ENABLE": "2"},
    "blocking launches": {"ASCEND_LAUNCH_BLOCKING": "1"},
    "expandable segments": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
}
_OTHERS = sorted(_TRAINING.keys() - {"a queue"})


@pytest.mark.parametrize(
    "settings", ["a queue", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in _OTHERS)]
)
def test_training_has_the_cpus_losses_bit_for_bit_with(settings):
    losses = _json(_on_host_npu(_TESTS / "training.py", **_TRAINING[settings]))
    assert losses["npu"] == losses["cpu"]
    assert losses["cpu"][-1] < losses["cpu"][0]


# What it consists of.


_ENDING = """
import threading, time
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


input = torch.ones(1, device="npu", requires_grad=True)
threading.Thread(target=lambda: Slow.apply(input).sum().backward(), daemon=True).start()
started.wait()
print("the end")
"""


def test_a_program_that_ends_during_a_backward_pass_does_not_abort(tmp_path):
    (tmp_path / "program.py").write_text(_ENDING)
    result = _on_host_npu(tmp_path / "program.py")
    assert (result.returncode, result.stdout) == (0, "the end\n"), result.stderr


def test_it_imports_nothing_of_the_operators():
    patterns = ("setup.py", "csrc/*.py", "host_npu/**/*.py", "tests/**/*.py")
    sources = [path for pattern in patterns for path in _TESTS.parent.glob(pattern)]
    imports = [
        line for path in sources for line in path.read_text().splitlines() if re.match(r"\s*(import|from) ", line)
    ]
    assert imports and not [line for line in imports if "torch_aclnn_ops" in line]


@pytest.fixture
def libraries(monkeypatch):
    """What csrc/build.py builds, in its order."""
    monkeypatch.syspath_prepend(_PACKAGE / "csrc")
    return importlib.import_module("build").libraries()


def test_every_library_that_is_built_is_loaded(libraries):
    assert sorted(_libraries.names()) == sorted(library.name for library in libraries)


def test_every_folder_of_sources_is_a_library_that_is_linked_with_those_before_it(libraries):
    folders = {file.parent.name for file in (_PACKAGE / "csrc").glob("*/*.cpp")}
    assert {library.name for library in libraries} == folders - {"tests"}
    for index, library in enumerate(libraries):
        assert set(library.links) <= {before.name for before in libraries[:index]}


# Statistics and failures.


def test_launches_are_counted_by_operator(facts):
    assert facts["mse_loss"] == [{}, {"aclnnMseLossBackward": 1}]


def test_what_is_alive_is_counted(facts):
    assert facts["alive"] == [0, 1, 0]


def test_what_was_never_there_counts_0(facts):
    assert facts["never_alive"] == 0


def test_device_bytes_are_counted(facts):
    during, after, peak = facts["device_bytes"]
    assert during >= 2**25
    assert (after, peak) == (0, during)


def test_the_nth_call_fails_as_asked(facts):
    pending, statuses, message, afterwards = facts["failure_of_the_second_call"]
    assert pending == {"aclrtGetDeviceCount": 1}
    assert statuses == [0, 507899, 0]
    assert message == "EZ9999: aclrtGetDeviceCount: the driver is gone"
    assert afterwards == {}


def test_reset_forgets_failures_to_come(facts):
    assert facts["failure_that_reset_forgets"] == 0


def test_reset_forgets_the_last_error(facts):
    message, status = facts["error_that_reset_forgets"]
    assert (message, status) == (None, 0)


def test_torch_npu_raises_what_was_asked_for_and_goes_on(facts):
    error, value = facts["failure_in_torch_npu"]
    assert "error code is 507046" in error
    assert "asked for" in error
    assert value == 1.0
