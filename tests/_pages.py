"""The pages of the documentation: their blocks of code, links and headings."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OTHER_PAGES = [ROOT / "host-npu/README.md", *ROOT.glob("host-npu/docs/*.md")]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *OTHER_PAGES])

_FENCE = re.compile(
    r'^```(?P<language>[\w+]*)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^```$', re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)

ON_NPU = "on an NPU"


class Block(NamedTuple):
    """A code block of a page; ``title`` is empty if it has none."""

    page: str
    line: int
    language: str
    title: str
    code: str


def name_of(page: Path) -> str:
    """Return a page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["title"] or "", found["code"])
        for found in _FENCE.finditer(text)
    ]


def new_side(diff: str) -> str:
    """Return the text that a diff leaves in the file."""
    return _side(diff, "-")


def old_side(diff: str) -> str:
    """Return the text that a diff expects in the file."""
    return _side(diff, "+")


def _side(diff: str, left_out: str) -> str:
    # Empty lines have lost their leading space.
    lines = diff.splitlines(keepends=True)
    return "".join(line[1:] or "\n" for line in lines if not line.startswith(left_out))


def run(block: Block, names: dict[str, object]) -> None:
    """Run a block of Python, a session of Python or the new side of a diff, with a page's names."""
    where = f"{block.page}, line {block.line}"
    if block.language == "pycon":
        test = doctest.DocTestParser().get_doctest(block.code, names, where, block.page, block.line)
        runner = doctest.DocTestRunner(verbose=False)
        test.globs = names  # not a copy
        output: list[str] = []
        assert runner.run(test, out=output.append, clear_globs=False).failed == 0, "".join(output)
        return
    code = new_side(block.code) if block.language == "diff" else block.code
    exec(compile("\n" * block.line + code, str(ROOT / block.page), "exec"), names)


def without_code(page: Path) -> str:
    """Return the text of a page without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", page.read_text()))


def links(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead into the repository."""
    for link in _LINK.findall(without_code(page)):
        if not re.match(r"[a-z]+:", link):
            yield link


def anchor(heading: str) -> str:
    """Return the anchor that repository hosts, and the site, generate for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page."""
    return {anchor(heading) for heading in _HEADING.findall(_FENCE.sub("", page.read_text()))}
