"""The tests of docs/testing.md and their commands, run as they stand there."""

import re

import pytest

from tests._pages import PROJECT, blocks, run

PAGE = PROJECT / "docs/testing.md"
FILES = {re.match(r"# (\S+)\n", code)[1]: code for title, code in blocks(PAGE, "python") if not title}
COMMANDS = [line for title, code in blocks(PAGE, "sh") if not title for line in code.splitlines()]


# What differs is how the host NPU is enabled, which one of the tests shows.
@pytest.mark.parametrize("command", [COMMANDS[0], *(f"{command} -k fused" for command in COMMANDS[1:])])
def test_the_tests_of_the_page_pass(tmp_path, command):
    for name, code in FILES.items():
        tmp_path.joinpath(name).write_text(code)
    count = 1 if "-k" in command else FILES["test_norm.py"].count("def test_")
    assert f"{count} passed" in run(tmp_path, command, "-p", "no:cacheprovider", OMP_NUM_THREADS="1")
