"""The files and entries that an operator needs, checked by the text of the sources, which need not be importable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A file, the text that it must contain, and what to write. {operator} is the name in all layers; {cann} and {raw} are
# CANN's functions and the raw operators, each of which needs the line. ELSEWHERE has other places of some files.
REQUIREMENTS = (
    (
        "torch_aclnn_ops/ops/{operator}.py",
        r"^\w+ = RawOperator\(",
        "write the raw operator: schema, check, formula, limits, `RawOperator(...)`",
    ),
    (
        "torch_aclnn_ops/ops/__init__.py",
        r"^from torch_aclnn_ops\.ops\.{operator}\b",
        "export the raw operator: `from torch_aclnn_ops.ops.{operator} import x as x`",
    ),
    (
        "torch_aclnn_ops/functional/{operator}.py",
        r"^def {operator}\(|^def \w*{operator}\(",
        "write the function that users call, as a `@drop_in` where torch has it",
    ),
    (
        "torch_aclnn_ops/functional/__init__.py",
        r"^from torch_aclnn_ops\.functional\.{operator} import",
        "export the function: `from torch_aclnn_ops.functional.{operator} import {operator} as {operator}`",
    ),
    ("torch_aclnn_ops/nn.py", r"F\.{operator}\(", "write the module whose `forward` calls `F.{operator}`"),
    (
        "csrc/npu/{operator}.cpp",
        r": Signature<[^;{{]*> \{{\n(?:(?!^\}};).*\n)*?.* cann = \"{cann}\";",
        "write the struct of {cann}, a `Signature<...>` with name, cann, parameters and run(), and its `Register` line",
    ),
    (
        "host-npu/csrc/opapi/{operator}.cpp",
        r"^HOST_NPU_PHASE_TWO\({cann}, \w+\)\nHOST_NPU_PHASE_ONE {cann}GetWorkspaceSize\(",
        "write the simulated {cann}, from CANN's documents",
    ),
    (
        "host-npu/csrc/tests/{operator}_test.cpp",
        r"\b{cann}\b",
        "write the call of {cann}, what it refuses, and what it computes",
    ),
    (
        "tests/test_{operator}.py",
        r"\((?:DropIn|RawOperator)Contract\)|apply_fused_ema_adam_",
        "write the tables: `Case`s for DropInContract, `Sample`s and `ErrorInput`s for RawOperatorContract",
    ),
    (
        "docs/operators/{operator}.md",
        r"^## Formula$[\s\S]*^## What CANN does$[\s\S]*^## Limits$[\s\S]*^## Launches$[\s\S]*^## Precision, speed$",
        "write the page: Formula, What CANN does, Limits, Launches, Precision, speed",
    ),
    ("docs/precision.md", r"^\| `{raw}` ", "run `make precision`"),
    ("README.md", r"^\| .*\b{cann}\b.*\]\(docs/operators/{operator}\.md\)", "add the row of {cann}"),
    ("tests/public_api.txt", r"^\w*{operator}\(", "run `python -m tests.test_public_api`"),
)

ELSEWHERE = {"host-npu/csrc/tests/{operator}_test.cpp": "host-npu/tests/phase_one/{operator}.py"}


@dataclass(frozen=True)
class Missing:
    """Something that an operator lacks: the place, and what to write there."""

    operator: str
    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.path}: {self.what}"


def operators(root: Path) -> list[str]:
    """Return the names of CANN's operators: those with a file or a folder in any layer.

    A file of ``functional`` that is in no other layer and replaces no function of torch is a composition of torch's.
    """
    return sorted(_names(root, "torch_aclnn_ops/ops") | _names(root, "docs/operators") | _drop_ins(root))


def _drop_ins(root: Path) -> set[str]:
    functions = _names(root, "torch_aclnn_ops/functional")
    return {name for name in functions if "@drop_in" in _text(root, f"torch_aclnn_ops/functional/{name}.py")}


def _names(root: Path, folder: str) -> set[str]:
    return {path.stem for path in (root / folder).iterdir() if not path.name.startswith("_")}


def missing(root: Path) -> list[Missing]:
    """Return what all operators lack, in all layers of both projects."""
    return list(dict.fromkeys(found for operator in operators(root) for found in _missing(root, operator)))


def _missing(root: Path, operator: str) -> Iterator[Missing]:
    described = _text(root, f"torch_aclnn_ops/ops/{operator}.py") + _text(root, f"csrc/npu/{operator}.cpp")
    functions = dict.fromkeys(re.findall(r'\bcann ?= ?"(aclnn\w+)"', described)) or {"aclnn...": None}
    raws = dict.fromkeys(re.findall(r'^(\w+) = RawOperator\(|\bname = "(\w+)"', described, re.M))
    names = list(dict.fromkeys(one or other for one, other in raws)) or ["..."]
    is_drop_in = "@drop_in" in _text(root, f"torch_aclnn_ops/functional/{operator}.py")
    for path, pattern, what in REQUIREMENTS:
        if path == "torch_aclnn_ops/nn.py" and not is_drop_in:
            continue
        for cann, raw in [(cann, raw) for cann in functions for raw in names]:
            values = {"operator": operator, "cann": cann, "raw": raw}
            where, elsewhere = path.format(**values), ELSEWHERE.get(path, path).format(**values)
            if not re.search(pattern.format(**values), _text(root, where) + _text(root, elsewhere), re.M):
                yield Missing(operator, where, what.format(**values))


def _text(root: Path, name: str) -> str:
    """Return the text of a file, or of a folder of the same name and files that continue it."""
    path = root / name
    folder = path.with_suffix("")
    stem = path.stem.removesuffix("_test")
    rest = path.name.removeprefix(stem)  # "_test.cpp" or ".py"
    files = [path, *path.parent.glob(f"{stem}_*{rest}"), *folder.rglob("*.py")]
    return "".join(file.read_text() for file in files if file.is_file())
