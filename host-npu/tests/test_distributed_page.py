"""The files and commands of docs/distributed.md, run unchanged."""

import re

import pytest
import yaml

from tests._pages import PROJECT, run

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PROJECT.joinpath("docs/distributed.md").read_text(), re.DOTALL)
FILES = {match[1]: text for _, text in BLOCKS if (match := re.match(r"# (\S+)\n", text))}
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
WORKFLOW = yaml.safe_load(FILES[".github/workflows/distributed.yml"])["jobs"]["test"]
STEPS = [step["run"] for step in WORKFLOW["steps"] if step.get("run", "").startswith("python ")]

# Rank 1 dies in the first attempt.
DIES_ONCE = """
import os, signal, torch, torch.distributed as dist
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
attempt, x = os.environ["TORCHELASTIC_RESTART_COUNT"], torch.ones(4, device="npu")
dist.all_reduce(x)
if (attempt, dist.get_rank()) == ("0", 1):
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x)
print(f"sum {x[0].item():.0f} in attempt {attempt}")
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path):
    for name in ("train.py", "test_train.py"):
        tmp_path.joinpath(name).write_text(FILES[name])
    return tmp_path


def _run(folder, command, ranks=2, **variables):
    command = re.sub("(--devices|--nproc-per-node) 2", rf"\1 {ranks}", command)
    return run(folder, command, **WORKFLOW["env"], **variables)


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
    # Ranks may interleave their output.
    assert sorted(re.findall(r"rank \d of \d is done", output)) == [
        f"rank {i} of {ranks} is done" for i in range(ranks)
    ]


# torchrun gives the surviving rank 30 seconds to exit.
@pytest.mark.exhaustive
def test_the_ranks_restart_after_a_death_with_the_setting_of_the_page(folder):
    page = PROJECT.joinpath("docs/distributed.md").read_text()
    name, value = re.search(r"Set `(TORCH_DISABLE_SHARE_RDZV_TCP_STORE)=(1)`", page).groups()
    folder.joinpath("train.py").write_text(DIES_ONCE)
    output = _run(folder, COMMANDS[0].replace("train.py", "--max-restarts 1 train.py"), **{name: value})
    assert output.count("sum 4 in attempt 1") == 2
