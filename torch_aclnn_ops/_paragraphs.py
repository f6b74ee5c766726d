"""Text that fits the terminal: titles with indented paragraphs."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

_INDENT = 4
_NARROWEST, _WIDEST = 40, 100  # other lines are hard to read


def terminal_width() -> int:
    """Return the columns of the terminal, or of ``COLUMNS``, from 40 to 100."""
    return min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)


def titled(sections: Iterable[tuple[str, Sequence[str]]], width: int) -> str:
    """Return each title with its paragraphs below it; a word that is longer than a line, such as a path, is kept whole.

    Args:
        sections: Titles and paragraphs; empty paragraphs are left out.
        width: Columns of a line.
    """
    lines = []
    for title, paragraphs in sections:
        lines.append(title)
        for paragraph in filter(None, paragraphs):
            lines += textwrap.wrap(
                paragraph,
                width,
                initial_indent=" " * _INDENT,
                subsequent_indent=" " * 2 * _INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
