"""The tests of docs/testing.md and their commands, run as they stand there."""

import os
import re
import subprocess
import sys

import pytest

from tests._pages import PROJECT, blocks

PAGE = PROJECT / "docs/testing.md"
FILES = {re.match(r"# (\S+)\n", code)[1]: code for title, code in blocks(PAGE, "python") if not title}
COMMANDS = [line for title, code in blocks(PAGE, "sh") if not title for line in code.splitlines()]


# What differs is how the host NPU is enabled, which one of the tests shows.
@pytest.mark.parametrize("command", [COMMANDS[0], *(f"{command} -k fused" for command in COMMANDS[1:])])
def test_the_tests_of_the_page_pass(tmp_path, command):
    for name, code in FILES.items():
        tmp_path.joinpath(name).write_text(code)
    python, *arguments = command.split()
    assert python == "python"
    # A reader has not set it.
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    result = subprocess.run(
        [sys.executable, *arguments, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    count = 1 if "-k" in command else FILES["test_norm.py"].count("def test_")
    assert f"{count} passed" in result.stdout
