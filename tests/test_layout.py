"""What CONTRIBUTING says about the layout: imports run one way, and an operator's files have its name."""

import ast
import graphlib
from collections import defaultdict
from pathlib import Path

from torch_aclnn_ops import ops

import pytest

from tests._raw_operator import contracts

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_aclnn_ops"

# From the bottom to the top; a module of the package that is in no other layer is at the bottom.
LAYERS = (
    ("torch_aclnn_ops.ops",),
    ("torch_aclnn_ops.functional",),
    ("torch_aclnn_ops.nn", "torch_aclnn_ops.optim"),
    ("torch_aclnn_ops._explain", "torch_aclnn_ops.doctor", "torch_aclnn_ops.host_npu"),
)

OPERATORS = ("mse_loss", "binary_cross_entropy", "embedding", "linear_cross_entropy", "ema_adam")
PLACES = (
    "torch_aclnn_ops/ops/{}.py",
    "torch_aclnn_ops/functional/{}.py",
    "csrc/npu/{}.cpp",
    "csrc/host_npu/opapi/{}.cpp",
    "tests/test_{}.py",
    "benchmarks/{}.py",
)


def _modules() -> dict[str, Path]:
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = _modules()


def _imports() -> dict[str, set[str]]:
    """Return what each module imports of the package, inside functions too."""
    found = defaultdict(set)
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names if alias.name in MODULES)
            elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name].update(members & MODULES.keys() or {node.module})
    return found


def _layer(name: str) -> int:
    for number, prefixes in enumerate(LAYERS, start=1):
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes):
            return number
    return 0


def test_no_two_modules_import_each_other_not_even_through_others() -> None:
    try:
        graphlib.TopologicalSorter(_imports()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_module_imports_one_of_a_higher_layer() -> None:
    upwards = [
        f"{name} imports {imported}"
        for name, imports in _imports().items()
        for imported in imports
        if name != "torch_aclnn_ops" and _layer(imported) > _layer(name)
    ]
    assert not upwards


def test_the_optimizer_imports_no_private_module_of_functional() -> None:
    private = [
        f"{name} imports {imported}"
        for name, imports in _imports().items()
        for imported in imports
        if _layer(name) > 2 and imported.startswith("torch_aclnn_ops.functional.") and "._" in imported
    ]
    assert not private


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_has_its_name_in_every_layer(operator: str, place: str) -> None:
    path = ROOT / place.format(operator)
    alternatives = [path, path.with_suffix(""), *path.parent.glob(f"{path.stem}_*{path.suffix}")]
    assert any(alternative.exists() for alternative in alternatives)


@pytest.mark.parametrize("folder", ["torch_aclnn_ops", "csrc", "benchmarks", "examples"])
def test_files_stay_near_300_lines(folder: str) -> None:
    files = [path for pattern in ("*.py", "*.cpp", "*.h") for path in (ROOT / folder).rglob(pattern)]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert files and not {path: length for path, length in lengths.items() if length > 330}


def test_every_raw_operator_has_a_table_of_samples_and_refusals() -> None:
    tested = {contract.OPERATOR.name for contract in contracts()}
    assert tested == set(ops.__all__) - {"apply_fused_ema_adam_"}  # which has tables of its own, in test_ema_adam.py
