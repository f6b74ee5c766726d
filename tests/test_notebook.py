"""The quick start as a notebook: made of the page, and its cells run one after the other."""

import importlib.util
import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
MODULE = runpy.run_path(str(DOCS / "_notebook.py"))
CELLS = json.loads((DOCS / "quick_start.ipynb").read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_is_that_of_the_page():
    assert (DOCS / "quick_start.ipynb").read_text() == MODULE["text"](), "run python docs/_notebook.py"


def test_the_cells_of_the_notebook_run_in_order(capsys):
    names = {"__name__": "__main__"}
    for cell in CODE:
        exec(compile(cell, "cell", "exec"), names)
    assert "native PyTorch kernel" in capsys.readouterr().out
    assert names["averaged"] > names["loss"]


def test_the_first_cell_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="torch_aclnn_ops is not installed. .* `%pip install torch "):
        exec(CODE[0], {})


def test_the_cells_are_those_that_every_version_4_of_the_format_has():
    for cell in CELLS:
        needed = {"cell_type", "metadata", "source"}
        assert set(cell) == (needed | {"execution_count", "outputs"} if cell["cell_type"] == "code" else needed)


@pytest.mark.parametrize(
    ("block", "kinds"),
    [
        ("```python\na = 1\n```\n\nText.\n", ["markdown", "code", "markdown"]),
        ('```python title="on an NPU"\na = 1\n```\n', ["markdown"]),
        ("```sh\nls\n```\n", ["markdown"]),
    ],
)
def test_only_blocks_that_run_on_a_cpu_become_cells(block, kinds):
    cells = MODULE["notebook"](f"# Title\n\nWhat it is.\n\n## Section\n\n{block}")["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", *kinds]


def test_the_outputs_are_stored():
    printed = ["".join(output["text"]) for cell in CELLS for output in cell.get("outputs", ())]
    assert printed[0].startswith("torch_aclnn_ops is installed")
    assert "mse_loss_backward: native PyTorch kernel, because the tensors are on cpu\n" in printed
