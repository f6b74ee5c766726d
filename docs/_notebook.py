"""Writes docs/quick_start.ipynb, the notebook of docs/quick_start.md: ``python docs/_notebook.py``."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("quick_start.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")
# What only the page says.
_OF_THE_PAGE = "It is also a [notebook](quick_start.ipynb). "
_INSTALL = """\
# Run this cell first: it checks the installation, and says what to install.
import importlib.util

if importlib.util.find_spec("torch_aclnn_ops") is None:
    raise ModuleNotFoundError(
        "torch_aclnn_ops is not installed. In new cells, run `%pip install torch 'setuptools>=77' ninja` and then"
        " `%pip install --no-build-isolation --editable FOLDER`, where FOLDER is a checkout of its repository ('..' if"
        " this notebook is opened in docs/ of one). This compiles the CPU kernels; without g++, run"
        " `%pip install torch FOLDER` instead. Then restart the kernel and run this cell again."
    )
print("torch_aclnn_ops is installed; `!python -m torch_aclnn_ops.doctor` shows whether its CPU kernels are compiled")"""
# Blocks without a title run on a CPU; all others are shown.
_RUN = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """Return the notebook of a page in Markdown: a cell that says what to install, its text, and its code in cells.

    The code runs, and the cells store what it prints.
    """
    begin, heading, rest = page.replace(_OF_THE_PAGE, "").partition("\n## ")
    parts = _RUN.split(heading + rest)
    sources = [("markdown", begin), ("code", _INSTALL)]
    sources += [("code" if index % 2 else "markdown", part) for index, part in enumerate(parts)]
    cells = [_cell(kind, source.strip()) for kind, source in sources]
    _store_outputs([cell for cell in cells if cell["cell_type"] == "code"])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def _cell(kind: str, source: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def _store_outputs(cells: list[dict[str, Any]]) -> None:
    """Run the cells in order, and store what they print."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for count, cell in enumerate(cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {count}", "exec"), names)
        cell["execution_count"] = count
        if lines := printed.getvalue().splitlines(keepends=True):
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}]


def text() -> str:
    """Return what is in the file of the notebook."""
    return json.dumps(notebook(PAGE.read_text()), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(text())
