"""The C++ extension of docs/testing.md, compiled and run with its commands."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from host_npu import _cann_home, _libraries

from tests._pages import PROJECT, blocks

PAGE = PROJECT / "docs/testing.md"
TITLE = ' title="C++ extension"'

# SiLU of 1, times 2: of the first and the second half.
_LINKED = """
#include <cstdint>
#include <cstdio>

#include "acl/acl.h"

int main() {
    aclInit(nullptr);
    aclrtSetDevice(0);
    const float given[]{1, 2};
    const std::int64_t two[]{2}, one[]{1};
    void *x = nullptr, *y = nullptr;
    aclrtMalloc(&x, 8, ACL_MEM_MALLOC_HUGE_FIRST);
    aclrtMalloc(&y, 4, ACL_MEM_MALLOC_HUGE_FIRST);
    aclrtMemcpy(x, 8, given, 8, ACL_MEMCPY_HOST_TO_DEVICE);
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    const auto* const two_numbers = aclCreateTensor(two, 1, ACL_FLOAT, one, 0, ACL_FORMAT_ND, two, 1, x);
    auto* const one_number = aclCreateTensor(one, 1, ACL_FLOAT, one, 0, ACL_FORMAT_ND, one, 1, y);
    if (aclnnSwiGluGetWorkspaceSize(two_numbers, -1, one_number, &size, &executor) != 0) {
        std::printf("%s\\n", aclGetRecentErrMsg());
        return 0;
    }
    float found = 0;
    if (aclnnSwiGlu(nullptr, size, executor, nullptr) != 0 || aclrtSynchronizeStream(nullptr) != 0) return 1;
    aclrtMemcpy(&found, 4, y, 4, ACL_MEMCPY_DEVICE_TO_HOST);
    std::printf("%.4f\\n", found);
}
"""


def test_a_program_without_python_links_the_formulas(tmp_path):
    source, program = tmp_path / "linked.cpp", tmp_path / "linked"
    home = _cann_home.variables(Path(importlib.util.find_spec("torch_npu").origin).parent)["ASCEND_HOME_PATH"]
    headers = sorted(Path(home, "include", "aclnnop").glob("*.h"))
    assert len(headers) > 200  # the headers of all operators, which can be included together
    source.write_text("".join(f'#include "aclnnop/{header.name}"\n' for header in headers) + _LINKED)
    torch_folder = Path(torch.__file__).parent / "lib"
    [formulas] = re.findall(r"`(-Wl,--no-as-needed [^`]+)`", PAGE.read_text())
    for flags, expected in (
        ("", "does not simulate aclnnSwiGlu without libhost_npu_formulas.so, in which most operators are"),
        (formulas, "1.4621\n"),
    ):
        folders = [
            word for folder in (_libraries.FOLDER, torch_folder) for word in (f"-L{folder}", f"-Wl,-rpath,{folder}")
        ]
        libraries = [*flags.split(), "-lopapi", "-lnnopbase", "-lascendcl"]
        subprocess.run(["g++", "-o", program, source, f"-I{home}/include", *folders, *libraries], check=True)
        result = subprocess.run([program], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0 and expected in result.stdout, result.stdout + result.stderr


@pytest.mark.exhaustive  # torch/extension.h takes a minute
def test_the_extension_of_the_page_compiles_and_runs(tmp_path):
    for language, comment in (("cpp", "//"), ("python", "#")):
        for code in [code for title, code in blocks(PAGE, language) if title == TITLE]:
            name = re.match(rf"{comment} (\S+)\n", code)[1]
            tmp_path.joinpath(name).write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}{os.pathsep}{tmp_path}", "MAX_JOBS": "1"}
    [commands] = [code for title, code in blocks(PAGE, "sh") if title == TITLE]
    for command in commands.splitlines():
        python, *arguments = command.split()
        assert python == "python"
        result = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert result.returncode == 0, result.stdout + result.stderr
    for blocking in ("1", "0"):
        refused = tmp_path.joinpath("refused.py").read_text().replace('"1"', f'"{blocking}"')
        # Without blocking, timing decides whether the call or the synchronization raises.
        program = refused.replace("\nexcept", "\n    torch.npu.synchronize()\nexcept")
        result = subprocess.run(
            [sys.executable, "-m", "host_npu", "-c", program],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "self has dtype int32 instead of float32, float16 or bfloat16" in result.stdout, result.stderr
