"""Writes docs/quick_start.ipynb, the notebook of docs/quick_start.md: ``python docs/_notebook.py``."""

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("quick_start.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")
# What only the page says.
_OF_THE_PAGE = "It is also a [notebook](quick_start.ipynb). "
_INSTALL = """\
# Run this cell first: it says what to install.
import importlib.util

if importlib.util.find_spec("torch_aclnn_ops") is None:
    raise ModuleNotFoundError(
        "torch_aclnn_ops is not installed. In a new cell, run `%pip install torch FOLDER`, where FOLDER is a checkout"
        " of its repository ('..' if this notebook is opened in docs/ of one) or its wheel. Then run this cell again."
    )"""
# Blocks without a title run on a CPU; all others are shown.
_RUN = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """Return the notebook of a page in Markdown: a cell that says what to install, its text, and its code in cells."""
    begin, heading, rest = page.replace(_OF_THE_PAGE, "").partition("\n## ")
    parts = _RUN.split(heading + rest)
    cells = [_cell("code" if index % 2 else "markdown", part.strip()) for index, part in enumerate(parts)]
    cells = [_cell("markdown", begin.strip()), _cell("code", _INSTALL), *cells]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def _cell(kind: str, source: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def text() -> str:
    """Return what is in the file of the notebook."""
    return json.dumps(notebook(PAGE.read_text()), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(text())
