"""What pages say of every operator, made of the sources, in the places of marks on the site and in the tests."""

import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = ROOT / "torch_aclnn_ops"


def drop_ins() -> str:
    """Return what mkdocstrings shows: the drop-ins."""
    exports = re.findall(r"^from (torch_aclnn_ops\S+) import (\w+) as \2$", _text("functional/__init__.py"), re.M)
    return "\n\n".join(f"::: {module}.{name}" for module, name in exports if name.islower())


def modules() -> str:
    """Return what mkdocstrings shows: the modules of nn; constructors of torch are not described again."""
    names = re.findall(r"^class (\w+)\(", _text("nn.py"), re.M)
    options = "    options: {docstring_options: {warn_missing_types: false, warn_unknown_params: false}}"
    return "\n\n".join(f"::: torch_aclnn_ops.nn.{name}\n{options}" for name in names)


def raw_operators() -> str:
    """Return the table of raw operators: what each is of CANN, and its page."""
    rows = ["| operator | CANN | page |", "|---|---|---|"]
    for path in sorted((_PACKAGE / "ops").rglob("*.py")):
        operator = path.relative_to(_PACKAGE / "ops").parts[0].removesuffix(".py")
        text = path.read_text()
        for name, cann in re.findall(r'^(\w+) = RawOperator\($(?:(?!^\)).)*?^    cann="(\w+)"', text, re.M | re.S):
            page = (ROOT / f"docs/operators/{operator}.md").read_text()
            anchor = "raw-operators" if "\n## Raw operators\n" in page else "raw-operator"
            rows.append(f"| `{name}` | {cann} | [{operator}](../operators/{operator}.md#{anchor}) |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {"drop-ins": drop_ins, "modules": modules, "raw operators": raw_operators}


def filled(markdown: str) -> str:
    """Return a page with what its marks stand for."""
    return re.sub(r"<!-- table: ([\w -]+) -->", lambda mark: TABLES[mark[1]](), markdown)


def _text(name: str) -> str:
    return (_PACKAGE / name).read_text()
