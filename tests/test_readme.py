"""What the README shows of other libraries, run as it stands there."""

import re
from pathlib import Path

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops import optim
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits

import lightning
import pytest
import transformers

from tests._language_models import batch, make

ROOT = Path(__file__).parents[1]
README = ROOT.joinpath("README.md").read_text()


def _run(library: str, **names: object) -> dict[str, object]:
    """Run the block about a library, with the names that a reader has."""
    [block] = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if f".{library} " in block]
    exec(block, names)
    return names


@pytest.fixture
def model_folder(tmp_path):
    make().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_lines_for_hugging_face_train_without_logits_and_save_averages(model_folder, tmp_path):
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    names = _run(
        "integrations.transformers",
        AutoModelForCausalLM=transformers.AutoModelForCausalLM,
        Trainer=transformers.Trainer,
        FusedEmaAdam=optim.FusedEmaAdam,
        arguments=arguments,
        path=model_folder,
        rows=[{name: one[row] for name, one in batch().items()} for row in range(2)],
    )
    names["trainer"].train()
    assert (tmp_path / "checkpoint-2/ema/model.safetensors").exists()
    assert isinstance(names["model"].train()(**batch()).logits, LazyLogits)


def test_the_line_for_lightning_gives_its_trainer_the_callback():
    trainer = _run("integrations.lightning", lightning=lightning)["trainer"]
    assert [type(one).__module__ for one in trainer.callbacks].count("torch_aclnn_ops.integrations.lightning") == 1


def _tests_of_the_table():
    text = ROOT.joinpath("docs/works_with.md").read_text()
    return sorted(set(re.findall(r"`([\w/]+)` `(\w+)`", text)))


@pytest.mark.parametrize(("file", "name"), _tests_of_the_table())
def test_what_works_with_this_package_has_the_test_that_the_table_names(file, name):
    assert f"def test_{name}(" in ROOT.joinpath("tests", f"{file}.py").read_text()
