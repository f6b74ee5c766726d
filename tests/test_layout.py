"""The layout described in CONTRIBUTING: layered imports, and complete files and lists for every operator."""

import ast
import graphlib
import inspect
import re
import runpy
from collections import defaultdict
from pathlib import Path

from torch_aclnn_ops import functional, ops

import pytest

from tests._operator_files import missing, operators

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_aclnn_ops"

# From the bottom to the top; modules of the package that are in no other layer are at the bottom.
LAYERS = (
    ("torch_aclnn_ops._autograd",),
    ("torch_aclnn_ops.ops",),
    ("torch_aclnn_ops.functional",),
    ("torch_aclnn_ops.nn", "torch_aclnn_ops.optim"),
    (
        "torch_aclnn_ops._patch",
        "torch_aclnn_ops._installation",
        "torch_aclnn_ops.doctor",
        "torch_aclnn_ops.integrations",
    ),
)

# Each has a file or a folder in ops/; other names there begin with an underscore.
OPERATORS = sorted(path.stem for path in (PACKAGE / "ops").iterdir() if not path.name.startswith("_"))
# The functions of operators; compositions of torch's functions have other names.
FUNCTIONS = [
    name
    for name in functional.__all__
    if name.islower() and inspect.getmodule(getattr(functional, name)).__name__.split(".")[2] in OPERATORS
]
CANN_NAMES = [getattr(ops, name).cann for name in ops.__all__]


def _modules() -> dict[str, Path]:
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = _modules()


def _imports() -> dict[str, set[str]]:
    """Return the imports of each module within the package, including those inside functions."""
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


def _pairs() -> list[tuple[str, str]]:
    """Return pairs of a module and one that it imports."""
    return [(name, imported) for name, imports in _imports().items() for imported in imports]


def test_no_module_imports_one_of_a_higher_layer() -> None:
    assert not [pair for pair in _pairs() if pair[0] != "torch_aclnn_ops" and _layer(pair[1]) > _layer(pair[0])]


def test_the_optimizer_imports_no_private_module_of_functional() -> None:
    of_optimizer = [pair for pair in _pairs() if _layer(pair[0]) > 3]
    private = [pair for pair in of_optimizer if pair[1].startswith("torch_aclnn_ops.functional.") and "._" in pair[1]]
    assert of_optimizer and not private


def test_private_names_of_torch_are_only_in_torch_compat() -> None:
    private = re.compile(r"\btorch(?:\.\w+)*\._[a-zA-Z]|\bfrom torch(?:\.\w+)* import .*\b_[a-zA-Z]")
    files = [path for name, path in MODULES.items() if not name.startswith("torch_aclnn_ops._torch_compat")]
    lines = [(path.name, line) for path in files for line in path.read_text().splitlines()]
    assert not [(name, line) for name, line in lines if private.search(line.partition("#")[0])]


def test_the_layout_of_contributing_names_what_exists() -> None:
    layout = (ROOT / "CONTRIBUTING.md").read_text().split("## Layout\n")[1].split("\n## ")[0]
    folder = parent = ROOT
    names = []
    for cell in re.findall(r"^\| (.*?) \|", layout, re.MULTILINE):
        for is_folder, name in re.findall(r"(\*\*)?`([^`]+)`", cell):
            if is_folder:
                folder = parent = ROOT / name
            paths = [path for base in (folder, parent) for path in base.glob(name.replace("<operator>", "*"))]
            assert paths or folder.is_dir() and is_folder, name
            parent = paths[0].parent if paths else folder
            names.append(name)
    assert "<operator>.py" in names and "nn.py" in names


def test_nine_files_of_at_most_3000_lines_are_to_be_read_first() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Read first\n")[1].split("\n## ")[0]
    files = [ROOT / name for name in re.findall(r"^\d\. `(.*?)`", section, re.MULTILINE)]
    assert len(files) == 9 and sum(len(file.read_text().splitlines()) for file in files) <= 3000


def test_the_package_imports_nothing_of_the_host_npu() -> None:
    nodes = [node for path in MODULES.values() for node in ast.walk(ast.parse(path.read_text()))]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert modules and not [module for module in modules if module.partition(".")[0] == "host_npu"]


def test_the_extension_includes_nothing_of_the_host_npu() -> None:
    sources = [path for path in (ROOT / "csrc/npu").iterdir() if path.suffix in (".cpp", ".h")]
    includes = [line for path in sources for line in re.findall(r"#include .*", path.read_text())]
    headers = {path.name for path in (ROOT / "host-npu/csrc").rglob("*.h")} - {path.name for path in sources}
    ours = [line for line in includes if "host_npu" in line or line.split('"')[1:2] and line.split('"')[1] in headers]
    assert includes and not ours


def test_every_operator_has_all_files_and_entries() -> None:
    assert operators(ROOT) == OPERATORS
    assert not missing(ROOT), "\n".join(["write:", *map(str, missing(ROOT))])


@pytest.mark.parametrize("folder", ["torch_aclnn_ops", "csrc", "benchmarks", "examples"])
def test_files_stay_near_300_lines(folder: str) -> None:
    files = [path for pattern in ("*.py", "*.cpp", "*.h") for path in (ROOT / folder).rglob(pattern)]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert files and not {path: length for path, length in lengths.items() if length > 340}


def test_every_signature_is_compared_with_canns_headers() -> None:
    check = runpy.run_path(str(ROOT / "csrc/npu/aclnn_api_check.py"))
    missing = set(CANN_NAMES) - {f"aclnn{name}" for name in check["signatures"]()}
    assert not missing, f"write `struct X : Signature<...>` with its name as cann in csrc/npu, for {missing}"
