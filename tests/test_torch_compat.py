"""Which names of torch the package uses, and with which torch it can be imported."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops import _torch_compat, functional
from torch_aclnn_ops.functional.linear_cross_entropy._arguments import options

import pytest
import torch

from tests import _torchs as torchs

PACKAGE = Path(torch_aclnn_ops.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# Public names that are not in every torch since 2.0, or are documented as unstable.
VERSION_DEPENDENT = (
    "torch.accelerator",
    "torch.amp.is_autocast_available",
    "torch.cpu.get_capabilities",
    "torch.fx.experimental",
    "torch.library.register_vmap",
    "torch.nn.Buffer",
    "torch.nn.LinearCrossEntropyLoss",
    "torch.nn.LinearCrossEntropyOptions",
    "torch.nn.functional.linear_cross_entropy",
    "torch.ops.mkldnn",
)
# typing.NamedTuple documents these.
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Return the names that a module gives to parts of torch, with their paths."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    path = alias.name if alias.asname else "torch"
                    found[alias.asname or "torch"] = path
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def _dotted(node: ast.expr) -> list[str]:
    """Return the parts of ``a.b.c``; the first one is empty where that is no name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(parts)]


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines, those of attributes included."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _dotted(node)[0] == "self":
            yield node.attr


def names_of_torch(code: str, own: set[str] = frozenset()) -> list[str]:
    """Return the private and version-dependent names of torch in a module; ``own`` are those that are not torch's."""
    tree = ast.parse(code)
    aliases = _aliases(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found.update(name for name in modules if name.split(".")[0] == "torch" and "._" in name)
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own | OF_NAMED_TUPLES:
            found.add(".".join(_dotted(node)))
        if isinstance(node, ast.Attribute):
            first, *rest = _dotted(node)
            paths = [".".join([aliases[first], *rest])] if first in aliases else []
        else:
            paths = list(aliases.values()) if isinstance(node, ast.Module) else []
        for path in paths:
            if any(map(_is_private, path.split("."))) or f"{path}.".startswith(
                tuple(f"{name}." for name in VERSION_DEPENDENT)
            ):
                found.add(path)
    return sorted(found)


@cache
def _own_names() -> set[str]:
    """Return what the package's modules define, and their names."""
    defined = {name for path in PACKAGE.rglob("*.py") for name in _defined(ast.parse(path.read_text()))}
    return defined | {Path(name).stem for name in MODULES}


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("_torch_compat")])
def test_no_other_module_has_private_and_version_dependent_names_of_torch(module):
    assert names_of_torch((PACKAGE / module).read_text(), _own_names()) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch._C._functorch.peek()", ["torch._C", "torch._C._functorch", "torch._C._functorch.peek"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree", "torch.utils._pytree.tree_map"]),
        ("from torch import nn\nnn.Buffer", ["torch.nn.Buffer"]),
        ("from torch.nn import Buffer as B", ["torch.nn.Buffer"]),
        ("import torch.nn.functional as F\nF.linear_cross_entropy", ["torch.nn.functional.linear_cross_entropy"]),
        ("def f(tensor): return tensor._version", ["tensor._version"]),
        ("def f(op): return op()._schema", ["._schema"]),
        ("import torch\ntorch.nn.Linear.__init__", []),
    ],
)
def test_such_names_are_found(code, found):
    assert names_of_torch(code) == found


def _taken_from_that_module() -> Iterator[str]:
    for module in MODULES:
        for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch_aclnn_ops._torch_compat":
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.Attribute) and _dotted(node)[-2] == "_torch_compat":
                yield node.attr


def test_what_that_module_imports_is_used_there_or_taken_from_there():
    nodes = list(ast.walk(ast.parse((PACKAGE / "_torch_compat.py").read_text())))
    aliases = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    imported = {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    assert imported - used - {*_taken_from_that_module()} == set()


def test_the_versions_are_those_that_pip_is_told():
    (oldest, newest) = _torch_compat.OLDEST, _torch_compat.NEWEST
    told = (PACKAGE.parent / "pyproject.toml").read_text()
    range_ = f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert re.search(rf'"torch{re.escape(range_)}"', told)
    assert re.search(rf'"torch_npu{re.escape(range_)}"', told)


def _import_with(change: str) -> subprocess.CompletedProcess[str]:
    """Import the package after torch was changed."""
    return subprocess.run(
        [sys.executable, "-c", f"import torch\n{change}\nimport torch_aclnn_ops"],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "torch.__version__ = '2.8.0+cu126'",
            'needs torch 2.9 to 2.14, but torch 2.8.0+cu126 is installed; pip install "torch>=2.9,<2.15"',
        ),
        pytest.param(
            "torch.__version__ = '1.13.1'",
            "needs torch 2.9 to 2.14, but torch 1.13.1 is installed",
            marks=pytest.mark.exhaustive,
        ),
        (
            "torch.__version__ = '2.15.0'; del torch._C._after_autograd_keyset",
            "but torch 2.15.0 is installed, which lacks what the package uses (cannot import name"
            " '_after_autograd_keyset' from 'torch._C'",
        ),
        pytest.param(
            "torch.__version__ = '3.0.0'; del torch._fused_adam_",
            "torch 3.0.0 is installed, which lacks",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_torch_that_does_not_fit_is_refused_in_a_sentence(change, sentence):
    *_, last = _import_with(change).stderr.strip().splitlines()
    assert last.startswith("ImportError: torch_aclnn_ops needs") and sentence in last


@pytest.mark.parametrize("change", ["torch.__version__ = '2.15.0.dev20270101'", "torch.__version__ = '2.9.0a0+git1'"])
def test_another_torch_is_taken_if_it_has_the_names(change):
    result = _import_with(change)
    assert result.returncode == 0, result.stderr


INPUT = torch.linspace(-1, 1, 6).reshape(2, 3)
HEAD = torch.linspace(1, 2, 12).reshape(4, 3)
TARGET = torch.tensor([1, 3])


@pytest.mark.skipif(not torchs.HAS_LINEAR_CROSS_ENTROPY, reason="torch has a linear_cross_entropy since 2.13")
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"input": INPUT.double()},
        {"input": INPUT[None]},
        {"input": INPUT.sum()},
        {"input": INPUT.long(), "linear_weight": HEAD.long()},
        {"input": INPUT[0], "target": TARGET[0]},
        {"linear_weight": HEAD[0]},
        {"linear_weight": HEAD[:, :2]},
        {"linear_weight": HEAD.reshape(2, 2, 3)},
        {"linear_weight": HEAD.reshape(2, 2, 3), "target": TARGET[:, None].expand(2, 2) - 1},
        {"linear_weight": HEAD.reshape(2, 2, 3), "input": INPUT[0], "target": TARGET},
        {"linear_bias": HEAD[:, 0]},
        {"linear_bias": HEAD[:3, 0]},
        {"target": torch.full((2, 4), 0.25), "ignore_index": 1},
        {"target": TARGET[:1]},
        {"weight": HEAD[:3, 0]},
        {"reduction": "average"},
        {"label_smoothing": 1.5},
        {"ignore_index": 3},
    ],
    ids=lambda change: " and ".join(change) or "nothing",
)
def test_a_call_that_is_left_to_an_older_torch_ends_as_in_a_newer_one(change, monkeypatch):
    call = {"input": INPUT, "linear_weight": HEAD, "target": TARGET, **change}
    monkeypatch.setattr(_torch_compat, "linear_cross_entropy", None)
    module = importlib.import_module("torch_aclnn_ops.functional.linear_cross_entropy")  # not the function of its name
    monkeypatch.setattr(module, "is_supported", lambda *_, **__: False)
    if error := _error_of(torchs.functional.linear_cross_entropy, call):
        mine = _error_of(functional.linear_cross_entropy, call)
        assert type(mine) is type(error)
    else:
        assert torch.equal(functional.linear_cross_entropy(**call), torchs.functional.linear_cross_entropy(**call))


def _error_of(function, call):
    try:
        function(**call)
    except Exception as error:
        return error
    return None


def test_options_are_refused_where_torch_has_none(monkeypatch):
    monkeypatch.setattr(options, "LinearCrossEntropyOptions", None)
    with pytest.raises(TypeError, match="options must be None with a torch that has no LinearCrossEntropyOptions"):
        functional.linear_cross_entropy(INPUT, HEAD, TARGET, options=object())


def test_the_modules_base_where_torch_has_none_has_the_same_constructor_state_and_description():
    bases = (_torch_compat._LinearCrossEntropyLoss, torchs.nn.LinearCrossEntropyLoss)
    mine, theirs = (
        base(3, 5, out_features=(2,), bias=True, weight=torch.ones(5), label_smoothing=0.1) for base in bases
    )
    assert repr(mine).partition("(")[2] == repr(theirs).partition("(")[2]
    theirs.load_state_dict(mine.state_dict())
    names = [list(inspect.signature(base.__init__).parameters) for base in bases]
    assert names[0] == names[1]


@pytest.mark.parametrize("options", [{"weight": torch.ones(4)}, {"label_smoothing": 1.5}], ids=str)
def test_that_base_refuses_what_torchs_refuses(options):
    with pytest.raises(RuntimeError, match=f"LinearCrossEntropyLoss: {next(iter(options))} must"):
        _torch_compat._LinearCrossEntropyLoss(3, 5, **options)
