"""The pages of this project, and their blocks of code."""

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
README = PROJECT / "README.md"
PAGES = [README, *sorted(PROJECT.glob("docs/*.md"))]
ON_NPU = ' title="on an NPU"'

_BLOCK = re.compile(r'^```(\w+)( title="[^"]*")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Return the titles and the code of a page's blocks in a language."""
    return [(title, code) for found, title, code in _BLOCK.findall(page.read_text()) if found == language]
