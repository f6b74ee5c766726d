"""The results of a type checker for users' code: calls of the package, and the pages' code."""

import importlib
import re

import pytest

from tests._children import run_python
from tests._pages import blocks
from tests.test_pages import GIVEN, ON_NPU, PUBLIC, RUNNING_PAGES

HEAD = """import torch
from torch import Tensor
from typing_extensions import assert_type
from torch_aclnn_ops import functional as F, nn
x, labels = torch.rand(3, 4), torch.arange(3)
"""
RIGHT = {
    "a loss": "F.linear_cross_entropy(x, x, labels, softcap=2.0).backward()",
    "an output": "F.linear_cross_entropy(x, x, labels, outputs=('entropy', 'z_loss')).entropy.mean()",
    "a module's output": "nn.LinearCrossEntropyLoss(4, 5).forward(x, labels, outputs=('entropy',)).entropy.mean()",
}
WRONG = {
    "a misspelled option": ("F.linear_cross_entropy(x, x, labels, sofcap=2.0)", 'did you mean "softcap"'),
    "a reduction that does not exist": ("F.mse_loss(x, x, reduction='avg')", "Literal['none', 'mean', 'sum']"),
    "an output that does not exist": ("F.linear_cross_entropy(x, x, labels, outputs=('loss_',))", "[arg-type]"),
    "a chunk size that is no number": (
        "F.linear_cross_entropy(x, x, labels, chunk_size='all')",
        "expected \"int | Literal['auto']\"",
    ),
}


# The part of torch that these calls need: the rest takes most of mypy's time.
SETTINGS = """[mypy]
[mypy-torch.*]
follow_imports = skip
[mypy-torch,torch._C.*,torch._tensor,torch.types]
follow_imports = silent
"""


def _mypy(*paths, settings=""):
    return run_python("-m", "mypy", f"--config-file={settings}", "--ignore-missing-imports", "--pretty", *paths)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return mypy's errors by file and line, for a program with valid calls and one with invalid calls."""
    folder = tmp_path_factory.mktemp("types")
    lines = {"right": RIGHT.values(), "wrong": [line for line, _ in WRONG.values()]}
    for name, calls in lines.items():
        (folder / f"{name}.py").write_text(HEAD + "\n".join(calls) + "\n")
    (folder / "settings.ini").write_text(SETTINGS)
    result = _mypy("--no-pretty", *folder.glob("*.py"), settings=folder / "settings.ini")
    assert "(checked 2 source files)" in result.stdout, result.stdout + result.stderr
    return re.findall(r"(\w+)\.py:(\d+): error: (.*)", result.stdout)


def test_types_of_results_are_as_narrow_as_the_arguments_allow(found):
    assert [error for error in found if error[0] != "wrong"] == []


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_argument_is_found(call, found):
    number = HEAD.count("\n") + 1 + list(WRONG).index(call)
    errors = [error for file, line, error in found if (file, line) == ("wrong", str(number))]
    assert any(WRONG[call][1] in error for error in errors), found


def _program_of(page):
    """Return the code of a page as one program, whose blocks may redefine names."""
    return "".join(block.code for block in blocks(page) if block.language == "python" and block.title != ON_NPU)


@pytest.mark.exhaustive
def test_the_code_of_every_page_is_well_typed(tmp_path):
    # Pages that use names defined by a test are not whole programs.
    for number, page in enumerate(sorted(set(RUNNING_PAGES) - GIVEN.keys())):
        (tmp_path / f"page{number}.py").write_text(f"# {page}\n{_program_of(page)}")
    result = _mypy("--allow-redefinition", *sorted(tmp_path.glob("*.py")))
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", PUBLIC)
def test_dir_shows_the_public_names(module):
    loaded = importlib.import_module(module)
    assert dir(loaded) == sorted(loaded.__all__)
