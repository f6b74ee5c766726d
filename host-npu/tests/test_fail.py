"""``host_npu.fail`` lets any function of the simulated libraries fail."""

import json
import shutil
import subprocess
import sys

import pytest
from host_npu import _libraries

# What returns nothing, or only an answer; AclSet... are other names of aclSet..., and a second phase needs a first one.
_CANNOT_FAIL = r"""
    ReleaseHugeMem UnInitHugeMemThreadLocal CanUsePTACache \w*PTA\w*HashKey \w*PTACacheThreadLocal PTA\w+ExecCache
    AddTensorAddrToCachedList aclDestroyTensorDesc aclopDestroyAttr aclSetTensorDescName aclGetDataBuffer\w+
    aclGetTensorDesc(Type|Format|NumDims) aclGetCompileoptSize aclAppLog aclGetRecentErrMsg
    AclSet\w+ aclrt(Get|PeekAt)LastError Msprof\w+ aclprof\w+ host_npu_\w+
    HcclGet(ErrorString|CommConfigCapability) aclnn\w+(?<!GetWorkspaceSize)
""".split()

_PROGRAM = """
import ctypes, json, re, sys
import host_npu

names, cannot_fail = json.loads(sys.argv[1])
runtime, wrong = ctypes.CDLL(None), []
runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
runtime.aclrtSetDevice(0)
for name in names:
    if re.fullmatch("|".join(cannot_fail), name):
        continue
    function = getattr(runtime, name)
    function.restype = ctypes.c_uint64
    host_npu.reset()
    runtime.aclGetRecentErrMsg()
    host_npu.count_calls()
    host_npu.fail(name, status=507899)
    result = function(*[ctypes.c_void_p()] * 14) % 2**32
    never_works = b"does not simulate" in (runtime.aclGetRecentErrMsg() or b"")
    if not never_works and (host_npu.stats().calls.get(name) != 1 or result not in (0, 507899)):
        wrong.append(name)
print(wrong)
"""


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_every_function_that_can_fail_does_so_when_asked(tmp_path):
    # libatb refuses every call by an exception of C++.
    libraries = [library for library in _libraries.FOLDER.glob("lib*.so") if library.name != "libatb.so"]
    listed = subprocess.run(["nm", "-D", "--defined-only", *libraries], capture_output=True, text=True, check=True)
    names = sorted({line.split()[-1] for line in listed.stdout.splitlines() if " T " in line and " _Z" not in line})
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    result = subprocess.run(
        [sys.executable, "-m", "host_npu", script, json.dumps([names, _CANNOT_FAIL])],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
