"""The comparison of other people's libraries on the host NPU with the CPU."""

from pathlib import Path

import pytest
from tests.client_programs import CLIENTS, Client, Result, difference, page, run

_PAGE = Path(__file__).with_name("client_programs.md")


@pytest.mark.parametrize(
    ("found", "expected", "problem"),
    [
        ([3.0, 2.0], [3.0, 2.000001], ""),
        ([3.0, 2.0], [3.0, 2.1], "loss 1 is 2.0 instead of 2.1"),
        ([float("nan")], [2.0], "loss 0 is nan instead of 2.0"),
        ([2.0], [2.0, 1.0], "1 losses instead of 2"),
        ([], [], "0 losses instead of 0"),
    ],
    ids=["close", "another loss", "nan", "too few", "none"],
)
def test_losses_are_those_of_the_cpu(found, expected, problem):
    assert difference(found, expected, 1e-5) == problem


@pytest.mark.parametrize(
    ("command", "problem"),
    [("echo loss 3", "loss 0 is 3.0 instead of 2.0"), ("echo ValueError: 1 >&2; exit 1", "status 1: ValueError: 1")],
)
def test_a_client_says_its_losses_or_its_error(command, problem, tmp_path):
    # The arguments are "-m host_npu -c" and the program.
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nexec sh -c "$4"\n')
    python.chmod(0o700)
    client = Client("a loss", "pytest", f"-c '{command}'", "-c 'echo loss 2'", python=str(python))
    assert run(client).problem == problem


def test_the_page_has_a_line_for_each_client():
    written = page([Result(Client("its own test", "pytest", "-c pass"), 2.0, "")])
    assert f"\n| pytest | {pytest.__version__} | its own test | `-c pass` | its own test |" in written


def test_the_page_names_every_client():
    rows = [line.split(" | ") for line in _PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        (f"| {client.package}", client.name, f"`{client.command}`") for client in CLIENTS
    ]
