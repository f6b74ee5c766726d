"""Generated sections of pages, between two comments, surrounded by handwritten text."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

_END = "<!-- end of figures -->"


def write_between(page: Path, title: str, text: str) -> None:
    """Put a text between the comments of a page that have this title, or as a section at its end."""
    folder = os.open(page.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # other processes may write other sections
        page.write_text(put_between(page.read_text(), title, text))
    finally:
        os.close(folder)


def put_between(page: str, title: str, text: str) -> str:
    """Return a page with a text between the comments that have this title, or as a section at its end."""
    begin = f"<!-- figures: {title} -->"
    figures = f"{begin}\n\n{text.strip()}\n\n{_END}"
    if begin not in page:
        return f"{page.rstrip()}\n\n## {title}\n\n{figures}\n"
    return re.sub(rf"{re.escape(begin)}.*?{re.escape(_END)}", lambda _: figures, page, count=1, flags=re.DOTALL)
