"""The files and commands of docs/distributed.md, run as they stand there."""

import re

import pytest
import yaml

from tests._pages import PROJECT, run

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PROJECT.joinpath("docs/distributed.md").read_text(), re.DOTALL)
FILES = {match[1]: text for _, text in BLOCKS if (match := re.match(r"# (\S+)\n", text))}
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
WORKFLOW = yaml.safe_load(FILES[".github/workflows/distributed.yml"])["jobs"]["test"]
STEPS = [step["run"] for step in WORKFLOW["steps"] if step.get("run", "").startswith("python ")]


@pytest.fixture
def folder(tmp_path):
    for name in ("train.py", "test_train.py"):
        tmp_path.joinpath(name).write_text(FILES[name])
    return tmp_path


def _run(folder, command, ranks=2):
    return run(folder, re.sub("(--devices|--nproc-per-node) 2", rf"\1 {ranks}", command), **WORKFLOW["env"])


def test_every_command_of_the_page_is_a_step_of_its_workflow():
    assert len(BLOCKS) == len(FILES) + len(COMMANDS)
    assert set(COMMANDS) <= set(STEPS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [step for step in STEPS if step not in COMMANDS])
def test_a_step_of_the_workflow_passes(folder, command):
    assert " 1 passed" in _run(folder, command)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (1, 3, 4))])
def test_torchrun_starts_any_number_of_ranks(folder, ranks):
    output = _run(folder, COMMANDS[0], ranks)
    # Ranks may write into one another's lines.
    assert sorted(re.findall(r"rank \d of \d is done", output)) == [
        f"rank {i} of {ranks} is done" for i in range(ranks)
    ]
