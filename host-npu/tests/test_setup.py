"""Installation: the contents of a wheel, and the messages if torch or torch_npu is missing."""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from host_npu import _libraries

_PROJECT = Path(__file__).resolve().parents[1]


def _run(*arguments: object, cwd: Path = _PROJECT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_wheel_runs_a_program_from_elsewhere_with_its_arguments(tmp_path):
    # In the work tree, so that compiled sources are not compiled again.
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    result = _run(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", _PROJECT, "-w", tmp_path)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("host_npu-*.whl")
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        file.extractall(tmp_path / "site")
    [metadata] = (tmp_path / "site").glob("*.dist-info/METADATA")
    requirements = Parser().parsestr(metadata.read_text()).get_all("Requires-Dist")
    libraries = {Path(name).name for name in names if name.endswith(".so")}
    assert libraries == {f"lib{name}.so" for name in _libraries.names()}
    assert {"host_npu/_children/sitecustomize.py", "host_npu/py.typed", "host_npu/_lib/versions.json"} <= {*names}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"host_npu"}
    # Otherwise pip would replace the torch that the libraries were compiled for, to meet torch_npu's requirements.
    assert not [needs for needs in requirements if "extra ==" not in needs]

    program = "import host_npu, sys, torch; print(host_npu.__file__, sys.argv, torch.ones(2).npu().sum())"
    (tmp_path / "program.py").write_text(program)
    options = ("-m", "host_npu", "program.py", "first", "--second")
    result = _run(*options, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    said = "['program.py', 'first', '--second'] tensor(2., device='npu:0')\n"
    assert result.stdout == f"{tmp_path / 'site/host_npu/__init__.py'} {said}", result.stderr


def test_each_library_that_is_compiled_is_named_when_it_is_done(tmp_path):
    build = ("csrc/build.py", tmp_path, "--names", "ge_runner", "graph")
    # Turning warnings into errors must not recompile anything.
    first, second = _run(*build, HOST_NPU_WERROR="0"), _run(*build, HOST_NPU_WERROR="1")
    assert first.returncode == second.returncode == 0, first.stderr
    begins, *done = first.stderr.splitlines()
    assert begins.startswith("host_npu: compiling the simulated libraries; all of them take about ")
    assert [line.partition(", after ")[0] for line in done] == [
        "host_npu: libge_runner.so (1 of 2)",
        "host_npu: libgraph.so (2 of 2)",
    ]
    assert second.stderr == ""


def test_without_torch_and_torch_npu_it_is_said_what_to_install_first(tmp_path):
    code = "import importlib.util, runpy, sys; importlib.util.find_spec = lambda name: None\n"
    code += "sys.argv = ['setup.py', 'build_ext', '--inplace']; runpy.run_path('setup.py', run_name='__main__')"
    result = _run("-c", code)
    assert result.returncode == 1
    assert "host_npu: no torch and no torch_npu in" in result.stderr
    assert "install torch and torch_npu first" in result.stderr


@pytest.mark.parametrize("versions", [("2.8.0+cpu", "2.8.0"), ("2.13.0", "2.12.0"), ("2.15.0", "2.15.0")], ids=str)
def test_versions_that_do_not_fit_are_refused_before_compiling(versions):
    installed = dict(zip(("torch", "torch_npu"), versions, strict=True))
    code = f"import importlib.metadata, runpy, sys; importlib.metadata.version = {installed}.get\n"
    code += "sys.argv = ['setup.py', 'build_ext', '--inplace']; runpy.run_path('setup.py', run_name='__main__')"
    result = _run("-c", code)
    assert result.returncode == 1
    said = f"host_npu: torch {versions[0].partition('+')[0]} and torch_npu {versions[1]} are installed"
    assert f"{said}: it needs the same version of both, 2.9 to 2.14" in result.stderr
