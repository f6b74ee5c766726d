"""``host_npu.fail`` makes any function of the simulated libraries fail, once, and refuses other names."""

import ctypes
import re
import shutil
import subprocess

import host_npu
import pytest
from host_npu import _libraries
from tests._process import on_npu
from tests._runtime import message, runtime

_PHASE_TWO = r"aclnn\w+(?<!GetWorkspaceSize)"


def _functions_that_do_not_fail(names: list[str]) -> list[str]:
    functions, wrong = ctypes.CDLL(None), []
    runtime.aclrtSetDevice(0)
    for name in names:
        function = getattr(functions, name)
        function.restype = ctypes.c_uint64
        host_npu.reset()
        message()
        host_npu.count_calls()
        host_npu.fail(name, status=507899)
        result = function(*[ctypes.c_void_p()] * 14) % 2**32
        if host_npu.stats().calls.get(name) != 1 or result not in (0, 507899):
            wrong.append(name)
    return wrong


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_every_function_that_can_fail_does_so_when_asked():
    # libatb refuses every call with a C++ exception.
    libraries = [library for library in _libraries.FOLDER.glob("lib*.so") if library.name != "libatb.so"]
    listed = subprocess.run(["nm", "-D", "--defined-only", *libraries], capture_output=True, text=True, check=True)
    names = sorted({line.split()[-1] for line in listed.stdout.splitlines() if " T " in line and " _Z" not in line})
    # A second phase needs a first one.
    names = [name for name in names if _libraries.can_fail(name) and not re.fullmatch(_PHASE_TWO, name)]
    assert len(names) > 200
    assert on_npu(_functions_that_do_not_fail, names) == []


@pytest.fixture(autouse=True)
def reset():
    yield
    host_npu.reset()


def _refusal(name):
    try:
        host_npu.fail(name)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["aclnnRmsNorn", "npu_rms_norm", "malloc", ""])
def test_other_functions_are_refused(name):
    assert _refusal(name) == (
        f"function must be one of CANN's, such as aclnnRmsNormGetWorkspaceSize, got {name!r}; "
        "count_calls() finds those that a program calls"
    )


def test_only_phase_one_of_a_refused_operator_can_fail():
    assert _refusal("aclnnQuantLightningIndexerGetWorkspaceSize") is None
    assert _refusal("aclnnQuantLightningIndexer") == (
        "the host NPU refuses aclnnQuantLightningIndexer in phase one, so phase two is never called: fail"
        " aclnnQuantLightningIndexerGetWorkspaceSize instead"
    )


@pytest.mark.parametrize("name", ["aclGetRecentErrMsg", "host_npu_reset"])
def test_a_function_without_a_status_cannot_fail(name):
    assert _refusal(name) == f"{name} has no status, and so it cannot fail"


def test_a_call_fails_once():
    assert _refusal("aclrtMemcpyAsync") is None
    assert _refusal("aclrtMemcpyAsync") == (
        "call 1 of aclrtMemcpyAsync from now on is already to fail: pass another nth"
    )
