"""The extension of docs/extensions.md, compiled and run by its commands."""

import os
import re
import subprocess
import sys

import pytest

from tests._pages import PROJECT, blocks

PAGE = PROJECT / "docs/extensions.md"


@pytest.mark.exhaustive  # torch/extension.h takes a minute
def test_the_extension_of_the_page_compiles_and_runs(tmp_path):
    for language, comment in (("cpp", "//"), ("python", "#")):
        for _, code in blocks(PAGE, language):
            name = re.match(rf"{comment} (\S+)\n", code)[1]
            tmp_path.joinpath(name).write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}{os.pathsep}{tmp_path}", "MAX_JOBS": "1"}
    [(_, commands)] = blocks(PAGE, "sh")
    for command in commands.splitlines():
        python, *arguments = command.split()
        assert python == "python"
        result = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert result.returncode == 0, result.stdout + result.stderr
    for blocking in ("1", "0"):
        refused = tmp_path.joinpath("refused.py").read_text().replace('"1"', f'"{blocking}"')
        # Without blocking, the task queue's thread decides whether the call or the synchronization raises.
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
