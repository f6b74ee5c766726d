"""The tests of docs/testing.md and their commands, run unchanged."""

import re

import pytest

from tests._pages import PROJECT, blocks, run

PAGE = PROJECT / "docs/testing.md"
FILES = {re.match(r"# (\S+)\n", code)[1]: code for title, code in blocks(PAGE, "python") if not title}
COMMANDS = [line for title, code in blocks(PAGE, "sh") if not title for line in code.splitlines()]


def test_the_first_command_of_the_page_is_that_of_tests_on_an_npu():
    assert COMMANDS[0] == "python -m host_npu -m pytest"  # like test_on_npu.py


# The commands differ in how they enable the host NPU.
@pytest.mark.parametrize("command", [pytest.param(COMMANDS[0], marks=pytest.mark.exhaustive), COMMANDS[1]])
def test_the_tests_of_the_page_pass(tmp_path, command):
    for name, code in FILES.items():
        tmp_path.joinpath(name).write_text(code)
    count = FILES["test_norm.py"].count("def test_")
    assert f"{count} passed" in run(tmp_path, command, "-p", "no:cacheprovider", OMP_NUM_THREADS="1")
