"""A page of figures that commands write, each its own sections."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

_VERSIONS = ("torch", "torch_npu", "torch_aclnn_ops")


def write_section(page: Path, title: str, command: str, text: str) -> None:
    """Put a section into a page, in place of the one with this title, or at its end.

    Args:
        page: a file in Markdown that exists.
        title: of the section.
        command: what found the figures.
        text: tables and lines; lines that belong to no table are kept as they are.
    """
    versions = ", ".join(f"{name} {version(name)}" for name in _VERSIONS)
    section = f"## {title}\n\n`{command}` with {versions}:\n\n{text.strip()}\n"
    old = page.read_text()
    sections = re.split(r"^(?=## )", old, flags=re.MULTILINE)
    titles = [one.split("\n", 1)[0] for one in sections]
    if f"## {title}" in titles:
        sections[titles.index(f"## {title}")] = section + "\n"
    else:
        sections.append(f"\n{section}")
    page.write_text("".join(sections).rstrip() + "\n")
