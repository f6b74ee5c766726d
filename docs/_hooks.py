"""What the site needs besides mkdocs: pages from outside of docs/, formulas as MathML, docstrings in Markdown."""

from __future__ import annotations

import posixpath
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_filled = runpy.run_path(str(ROOT / "docs/_tables.py"))["filled"]
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")


def _site_path(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def _links(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the relative links of a page, and the files of the repository that they lead to."""
    for link in _LINK.findall(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if "://" not in link and (ROOT / target).is_file():
            yield link, target


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let blocks of ```math be formulas, as they are where repositories are hosted; list the pages of operators."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "math", "format": lambda source, *_, **__: mathml(source, "block")})
    config.nav = [_with_all_pages(entry) for entry in config.nav or []]
    return config


def _with_all_pages(entry: Any) -> Any:
    """Return an entry of the navigation with the pages that fit its pattern, if it is one."""
    ((title, pages),) = entry.items()
    if not isinstance(pages, str) or "*" not in pages:
        return entry
    return {title: [path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").glob(pages))]}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page, and what pages link to outside of docs/."""
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, _site_path(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            found = {target for _, target in _links(path, (ROOT / path).read_text())}
            new = {target for target in found - seen if not target.startswith("docs/")}
            waiting += new
            seen |= new
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill the tables of operators, and turn links between files of the repository into links between pages."""
    markdown = _filled(markdown)
    uri = page.file.src_uri
    if uri == "index.md":
        page.meta["hide"] = ["navigation"]  # which has this page only
    generated = page.file.generated_by is not None
    path = "README.md" if uri == "index.md" else uri if generated else f"docs/{uri}"
    targets = dict(_links(path, markdown))
    folder = posixpath.dirname(uri)

    def relative(match: re.Match[str]) -> str:
        target = targets.get(match[1])
        return match[1] if target is None else posixpath.relpath(_site_path(target), folder or ".")

    return _LINK.sub(relative, markdown)


def mathml(formula: str, display: str) -> str:
    """Return a formula in LaTeX as MathML, which browsers show without a script."""
    rows = formula.strip().replace(r"\begin{aligned}", r"\begin{array}{rl}").replace(r"\end{aligned}", r"\end{array}")
    math: str = latex2mathml.converter.convert(rows.replace(r"\_", "_"), display=display)
    # A line that begins with a formula would be a paragraph of its own.
    return math if display == "block" else f"<span>{math}</span>"


class Docstrings(griffe.Extension):
    """Docstrings in Markdown: they are written with Sphinx's roles."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a function, class, method or module."""
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value)


def _source(match: re.Match[str]) -> str:
    """Return where an operator comes from as a line, and not as a box that unfolds."""
    return f"*Source: {' '.join(match[1].split())}*"


def _markdown(text: str) -> str:
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r"^Source:\s+(.+(?:\n.+)*)", _source, text, flags=re.MULTILINE)
    text = re.sub(r":math:`([^`]*)`", lambda match: mathml(match[1], "inline"), text)
    blocks = re.compile(r"^ *\.\. math::\n((?: +.*\n|\n)+)", re.MULTILINE)
    text = blocks.sub(lambda match: mathml(match[1], "block") + "\n\n", text)
    # A drop-in has the name of the module that it is in.
    text = re.sub(r":func:`(torch_aclnn_ops\.functional\.(\w+))`", r"[`\1`][\1.\2]", text)
    text = re.sub(r":\w+:`(torch_aclnn_ops[\w.]*)`", r"[`\1`][\1]", text)
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
