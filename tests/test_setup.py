"""Installing: what setup.py compiles, and what the source distribution and the wheels hold."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SWITCHES = ("TORCH_ACLNN_NPU", "TORCH_ACLNN_CPU")

# Read by Python before anything else: the packages named are not installed for this process and those that it starts.
WITHOUT = "import os, sys\nsys.modules.update(dict.fromkeys(os.environ['WITHOUT'].split()))\n"

# Runs setup.py once for each combination of the switches.
ALL_COMBINATIONS = """
import itertools, os, runpy, sys
for choices in itertools.product(["", "0"], repeat=2):
    os.environ.update(zip({switches}, choices))
    sys.argv = ["setup.py", "--quiet", "--name"]
    runpy.run_path({path!r}, run_name="__main__")
    print("done")
"""


@pytest.fixture
def run(tmp_path_factory):
    """Run Python with some packages missing."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text(WITHOUT)

    def run(*arguments: object, without: str = "", cwd: Path = ROOT, **environment: str):
        kept = {name: value for name, value in os.environ.items() if name not in SWITCHES}
        search_path = os.pathsep.join([str(folder), environment.pop("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**kept, **environment, "WITHOUT": without, "PYTHONPATH": search_path},
            cwd=cwd,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources, without what was compiled in the work tree."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "torch_aclnn_ops"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


def _pip(*arguments: object) -> tuple[object, ...]:
    return ("-m", "pip", *arguments, "--quiet", "--no-deps", "--no-index", "--no-build-isolation")


@pytest.mark.parametrize("without", ["", "torch_npu", "torch torch_npu"], ids=lambda names: names or "nothing")
@pytest.mark.every_nth_case(3)
def test_build_switches_work_in_every_combination(run, without):
    code = ALL_COMBINATIONS.format(switches=SWITCHES, path=str(ROOT / "setup.py"))
    result = run("-c", code, without=without)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split().count("done") == len(list(itertools.product(["", "0"], repeat=2)))


@pytest.mark.parametrize(
    ("without", "switches", "said"),
    [
        ("", {"TORCH_ACLNN_NPU": "0"}, "built without the NPU extension: TORCH_ACLNN_NPU=0"),
        pytest.param(
            "",
            {"TORCH_ACLNN_CPU": "0"},
            "built without the CPU kernels: TORCH_ACLNN_CPU=0",
            marks=pytest.mark.exhaustive,
        ),
        (
            "torch_npu",
            {},
            "built without the NPU extension: no torch_npu (pip sees what is installed with --no-build-isolation only)",
        ),
        ("torch torch_npu", {}, "built without the NPU extension: no torch and no torch_npu"),
        (
            "torch",
            {},
            "built without the CPU kernels: no torch (pip sees what is installed with --no-build-isolation only)",
        ),
    ],
)
@pytest.mark.every_nth_case(4)
def test_a_skipped_extension_is_reported_with_the_reason(run, without, switches, said):
    result = run("setup.py", "--name", without=without, **switches)
    assert result.returncode == 0, result.stderr
    assert f"torch_aclnn_ops: {said}" in result.stderr


@pytest.mark.parametrize(
    ("without", "switches", "said"),
    [
        ("torch", {"TORCH_ACLNN_CPU": "1"}, "TORCH_ACLNN_CPU=1 asks for the CPU kernels, but there is no torch"),
        (
            "torch_npu",
            {"TORCH_ACLNN_NPU": "1"},
            "TORCH_ACLNN_NPU=1 asks for the NPU extension, but there is no torch_npu",
        ),
        ("", {"TORCH_ACLNN_CPU": "yes"}, "TORCH_ACLNN_CPU must be 0, 1 or empty, but it is 'yes'"),
        ("", {"TORCH_ACLNN_NPU": "2"}, "TORCH_ACLNN_NPU must be 0, 1 or empty, but it is '2'"),
    ],
)
def test_a_build_switch_that_cannot_be_satisfied_raises(run, without, switches, said):
    result = run("setup.py", "--name", without=without, **switches)
    assert result.returncode == 1
    assert f"torch_aclnn_ops: {said}" in result.stderr


def test_each_part_that_is_compiled_is_named_before_and_after(run):
    # In the work tree, so that what was compiled there is not compiled again.
    result = run("setup.py", "--quiet", "build_ext", "--inplace", TORCH_ACLNN_NPU="1", TORCH_ACLNN_CPU="1")
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("torch_aclnn_ops: ")]
    for part, before, after in zip(("the NPU extension", "the CPU kernels"), said[::2], said[1::2], strict=True):
        assert before.startswith(f"torch_aclnn_ops: compiling {part}, about a minute")
        assert re.fullmatch(rf"torch_aclnn_ops: {part}: done after \d+ s", after)


@pytest.mark.exhaustive
def test_the_source_distribution_installs_where_there_is_neither_torch_nor_torch_npu(run, checkout, tmp_path):
    # So it is in pip's isolated build environment: this is `pip install torch .`.
    build = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    result = run("-c", build, tmp_path, without="torch torch_npu", cwd=checkout)
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    sources = {str(path.relative_to(checkout)) for path in (checkout / "csrc").rglob("*.*")}
    assert names >= sources
    assert not [name for name in names if name.startswith("host-npu")]

    result = run(*_pip("wheel", archive, "-w", tmp_path), without="torch torch_npu")
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    result = run(*_pip("install", wheel, "--target", tmp_path / "site"))
    assert result.returncode == 0, result.stderr
    code = (
        "from torch_aclnn_ops import functional, doctor; import torch; print(functional.__file__)\n"
        "x = torch.ones(2, requires_grad=True); functional.mse_loss(x, torch.zeros(2)).backward(); print(x.grad)"
    )
    result = run("-c", code, without="torch_npu", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert result.stdout.startswith(str(tmp_path / "site")), result.stderr
    assert "tensor([1., 1.])" in result.stdout


@pytest.mark.exhaustive  # `make release-check` builds and installs it, too
def test_a_wheel_that_is_built_beside_torch_npu_has_all_compiled_parts(run, tmp_path):
    # In the work tree, so that what was compiled there is not compiled again.
    result = run(*_pip("wheel", ROOT, "-w", tmp_path))
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as file:
        built = {Path(name).name.partition(".")[0] for name in file.namelist() if name.endswith(".so")}
    assert built == {"_C", "_cpu"}

    result = run(*_pip("install", wheel, "--target", tmp_path / "site"))
    assert result.returncode == 0, result.stderr
    code = (
        "import torch, torch_aclnn_ops as ops; print(ops.__file__)\n"
        "x = torch.ones(2).npu().requires_grad_()\n"
        "ops.functional.mse_loss(x, torch.zeros_like(x)).backward()\n"
        "print(x.grad.cpu())\n"
        "print(ops.launches()['aclnnMseLossBackward'])"
    )
    script = tmp_path / "program.py"
    script.write_text(code)
    result = run("-m", "host_npu", script, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert result.stdout.startswith(str(tmp_path / "site")), result.stderr
    assert result.stdout.split()[-3:] == ["tensor([1.,", "1.])", "1"]
