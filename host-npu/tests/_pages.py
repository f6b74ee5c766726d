"""The pages of this project and their code blocks."""

import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
README = PROJECT / "README.md"
PAGES = [README, *sorted(PROJECT.glob("docs/*.md"))]
ON_NPU = ' title="on an NPU"'

_BLOCK = re.compile(r'^```(\w+)( title="[^"]*")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Return the titles and the code of a page's blocks in a language."""
    return [(title, code) for found, title, code in _BLOCK.findall(page.read_text()) if found == language]


def run(folder: Path, command: str, *options: str, **variables: str) -> str:
    """Run a page's command ``python ...`` in a folder with its files, and return the output."""
    python, *arguments = command.split()
    assert python == "python"
    # A reader of the page has not set this variable.
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    result = subprocess.run(
        [sys.executable, *arguments, *options],
        cwd=folder,
        env=environment | variables | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
