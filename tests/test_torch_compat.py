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
from torch_aclnn_ops._torch_compat import fsdp, optimizer, public
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


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("_torch_compat/")])
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
def test_private_names_are_detected(code, found):
    assert names_of_torch(code) == found


COMPAT = sorted(name for name in MODULES if name.startswith("_torch_compat/"))


def _taken_from(module: str) -> Iterator[str]:
    """Yield what other modules take from one of these."""
    dotted = f"torch_aclnn_ops.{module.removesuffix('.py').replace('/', '.').removesuffix('.__init__')}"
    for other in MODULES:
        for node in ast.walk(ast.parse((PACKAGE / other).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == dotted:
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.Attribute) and _dotted(node)[-2] == Path(module).stem:
                yield node.attr


@pytest.mark.parametrize("module", COMPAT)
def test_every_name_of_these_modules_is_used(module):
    tree = ast.parse((PACKAGE / module).read_text())
    nodes = list(ast.walk(tree))
    aliases = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    imported = {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    tested = {"OLDEST", "NEWEST", "__all__"}
    assert (imported | assigned | functions) - used - {*_taken_from(module)} - tested == set()


def _private_names(module: str) -> set[str]:
    """Return the private names of torch in a module, those in strings that are looked up included."""
    code = (PACKAGE / module).read_text()
    tree = ast.parse(code)
    own = {*_defined(tree)} - {"_dynamo_marked_constant"}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    paths = [*names_of_torch(code, own), *strings - own]
    private = [path for path in paths if re.fullmatch(r"[\w.]+", path) and any(map(_is_private, path.split(".")))]
    return {path.rpartition(".")[2] for path in private}


def test_the_package_uses_few_private_names_of_torch_except_for_fsdp_and_lazy_logits():
    exempt = ("_torch_compat/fsdp.py", "_torch_compat/lazy_tensors.py")
    found = set().union(*(_private_names(module) for module in COMPAT if module not in exempt))
    assert {"_version", "_foreach_lerp_", "_dynamo_marked_constant"} < found
    assert len(found) <= 28, sorted(found)


def test_the_versions_match_those_of_both_projects():
    (oldest, newest) = _torch_compat.OLDEST, _torch_compat.NEWEST
    told = (PACKAGE.parent / "pyproject.toml").read_text()
    range_ = f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert re.search(rf'"torch{re.escape(range_)}"', told)
    assert f"OLDEST, NEWEST = {oldest}, {newest}\n" in (PACKAGE.parent / "host-npu/setup.py").read_text()


def _import_with(change: str) -> subprocess.CompletedProcess[str]:
    """Import the package after torch was changed."""
    return _run(f"import torch\n{change}\nimport torch_aclnn_ops")


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
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
            "torch.__version__ = '2.15.0'; del torch.library.register_vmap",
            "but torch 2.15.0 is installed, which lacks a required name (cannot import name 'register_vmap'",
        ),
    ],
)
def test_an_unsupported_torch_raises_a_clear_error(change, sentence):
    *_, last = _import_with(change).stderr.strip().splitlines()
    assert last.startswith("ImportError: torch_aclnn_ops needs") and sentence in last


@pytest.mark.parametrize("change", ["torch.__version__ = '2.15.0.dev20270101'", "torch.__version__ = '2.9.0a0+git1'"])
@pytest.mark.exhaustive
def test_another_torch_is_accepted_if_it_has_the_names(change):
    result = _import_with(change)
    assert result.returncode == 0, result.stderr


LOOKED_UP = ["_C._after_autograd_keyset", "_C._AutoDispatchBelowAutograd"]
REPLACED = {
    "transforms": [f"_C._functorch.{name}" for name in ("get_interpreter_stack", "is_functorch_wrapped_tensor")],
    "batches of gradients": ["_C._functorch.is_legacy_batchedtensor"],
    "forward mode": ["_C._is_fwd_grad_enabled"],
    "modes": [
        "_C._is_any_autocast_enabled",
        "_C._len_torch_dispatch_stack",
        "utils._python_dispatch._disable_current_modes",
    ],
    "lists": ["_foreach_add_", "_foreach_copy_", "_foreach_lerp_", "_fused_adam_", "_fused_adamw_"],
    "aliases": ["_C._storage_Use_Count"],
}
# Everything that a small training does, against numbers that torch found.
TRAINING = """
import warnings
from torch_aclnn_ops import functional as F, optim
weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
optimizer = optim.FusedEmaAdam([weight], lr=0.1)
target = torch.tensor([0, 1])
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = F.linear_cross_entropy(F.embedding(target, weight), weight, target) + F.mse_loss(weight, weight.detach() + 1)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("found", [round(loss, 4) for loss in losses])
print("batched", torch.func.vmap(torch.func.grad(F.mse_loss))(torch.ones(2, 2), torch.zeros(2, 2)).tolist())
"""


def _without(names: list[str], program: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a torch that lacks names, which its own modules have taken before."""
    deleted = "; ".join(f"del torch.{name}" for name in names)
    setup = f"import torch, torch._dynamo, torch.fx.experimental.proxy_tensor\n{deleted}"
    return _run(f"{setup}\nimport torch_aclnn_ops\nfrom torch_aclnn_ops import functional as F\n{program}")


@pytest.mark.parametrize("name", LOOKED_UP)
def test_without_a_private_name_only_calls_that_need_it_raise(name):
    call = "torch.ops.torch_aclnn_ops.mse_loss_backward(*[torch.ones(2)] * 3, 1)"
    result = _without([name], f"{TRAINING}\n{call}")
    *_, last = result.stderr.strip().splitlines()
    lacks = f"torch_aclnn_ops: torch {torch.__version__} lacks torch.{name}, which torch.ops.torch_aclnn_ops needs; "
    assert "found" in result.stdout and last.startswith(f"NotImplementedError: {lacks}")


def test_a_feature_without_its_private_name_raises_when_it_is_used():
    lacks = f"^torch_aclnn_ops: torch {re.escape(torch.__version__)} lacks "
    missing = _torch_compat.lookup("_dynamo.no_such_name", "a feature")
    for use in (missing, lambda: missing.member, lambda: missing & 1):
        with pytest.raises(NotImplementedError, match=f"{lacks}torch._dynamo.no_such_name, which a feature needs; "):
            use()
    with pytest.raises(NotImplementedError, match=f"{lacks}GradScaler._per_optimizer_states, which a GradScaler needs"):
        optimizer.per_optimizer_state(type("GradScaler", (), {})(), None)
    with pytest.raises(NotImplementedError, match=f"{lacks}a name .*, which an optimizer of parameters that FSDP has"):
        fsdp.Fsdp1Unit(type("Module", (), {"_handle": None})())


@cache
def _trained() -> str:
    return _run(f"import torch\n{TRAINING}").stdout


@pytest.mark.parametrize("names", REPLACED.values(), ids=REPLACED)
@pytest.mark.every_nth_case(5)
def test_without_optional_private_names_the_package_warns_and_computes_the_same(names):
    result = _without(names, TRAINING)
    assert result.stdout == _trained() != "", result.stderr
    for name in names:
        assert f"RuntimeWarning: torch_aclnn_ops: torch {torch.__version__} lacks torch.{name}, which" in result.stderr


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
def test_a_fallback_to_an_older_torch_behaves_like_a_newer_one(change, monkeypatch):
    call = {"input": INPUT, "linear_weight": HEAD, "target": TARGET, **change}
    monkeypatch.setattr(public, "linear_cross_entropy", None)
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


def test_options_raise_if_torch_has_no_options_class(monkeypatch):
    monkeypatch.setattr(options, "LinearCrossEntropyOptions", None)
    with pytest.raises(TypeError, match="options=.* requires torch 2.13 or newer"):
        functional.linear_cross_entropy(INPUT, HEAD, TARGET, options=object())


def test_the_fallback_base_module_has_torchs_constructor_state_and_representation():
    bases = (public._LinearCrossEntropyLoss, torchs.nn.LinearCrossEntropyLoss)
    mine, theirs = (
        base(3, 5, out_features=(2,), bias=True, weight=torch.ones(5), label_smoothing=0.1) for base in bases
    )
    assert repr(mine).partition("(")[2] == repr(theirs).partition("(")[2]
    theirs.load_state_dict(mine.state_dict())
    names = [list(inspect.signature(base.__init__).parameters) for base in bases]
    assert names[0] == names[1]


@pytest.mark.parametrize("options", [{"weight": torch.ones(4)}, {"label_smoothing": 1.5}], ids=str)
def test_the_fallback_base_module_raises_like_torchs(options):
    with pytest.raises(RuntimeError, match=f"LinearCrossEntropyLoss: {next(iter(options))} must"):
        public._LinearCrossEntropyLoss(3, 5, **options)
