"""What is loaded, and from where: nothing of the working directory, and nothing that everybody can write to."""

import os
import shutil
import subprocess
from pathlib import Path

from torch_aclnn_ops import _torch_npu

import host_npu
import pytest
import torch

from tests._children import run_python

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_aclnn_ops"
SAYS_HOSTILE = "print('hostile', flush=True)\n"
LIBRARIES = Path(host_npu.__file__).parent / "_lib"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(scope="module")
def hostile_library(tmp_path_factory):
    """A library that prints a message when it is loaded."""
    library = tmp_path_factory.mktemp("hostile") / "library.so"
    source = '#include <cstdio>\n__attribute__((constructor)) void load() { puts("hostile"); fflush(stdout); }\n'
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return library


@pytest.fixture
def hostile(tmp_path, hostile_library):
    """A working directory with everything in it that is loaded by a name."""
    folder = tmp_path / "hostile"
    for package in ("torch_npu", "torch", "numpy"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(SAYS_HOSTILE)
    (folder / "torch_aclnn_ops").mkdir()  # as a checkout of another project has it
    for name in (*_torch_npu._CANN_LIBRARIES, "libopapi.so", "libnnopbase.so"):
        shutil.copy(hostile_library, folder / name)
    return folder


@pytest.fixture
def installed(tmp_path):
    """A folder with a torch_npu that prints a message when it is imported."""
    (tmp_path / "installed" / "torch_npu-1.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: torch_npu\nVersion: 1.0\n"
    (tmp_path / "installed" / "torch_npu-1.0.dist-info" / "METADATA").write_text(metadata)
    backend = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    (tmp_path / "installed" / "torch_npu-1.0.dist-info" / "entry_points.txt").write_text(backend)
    (tmp_path / "installed" / "torch_npu.py").write_text("print('imported')\ndef _autoload(): pass\n")
    return tmp_path / "installed"


REASON = "import torch_aclnn_ops._torch_npu as found; print(found.why_unavailable(), found.is_installed())"
EMPTY_ENTRIES = [
    pytest.param(":", id="empty"),
    pytest.param(":/nowhere", id="first", marks=pytest.mark.exhaustive),
    pytest.param("/nowhere:", id="last", marks=pytest.mark.exhaustive),
    pytest.param(".", id="dot", marks=pytest.mark.exhaustive),
]


@needs_compiler
@pytest.mark.parametrize("entries", EMPTY_ENTRIES)
@pytest.mark.exhaustive
def test_an_empty_entry_in_ld_library_path_loads_no_library_of_the_working_directory(entries, hostile, installed):
    for package in ("torch", "numpy", "torch_npu"):
        shutil.rmtree(hostile / package)
    result = run_python("-c", REASON, cwd=hostile, path=[installed], LD_LIBRARY_PATH=entries)
    assert "torch_npu is installed, but CANN is not: libascendcl.so: cannot open" in result.stdout, result.stderr
    assert "hostile" not in result.stdout and "imported" not in result.stdout


def test_a_package_in_the_working_directory_alone_is_not_installed(tmp_path):
    for package, source in (("folder", None), ("package", SAYS_HOSTILE)):
        (tmp_path / package).mkdir()
        if source is not None:
            (tmp_path / package / "__init__.py").write_text(source)
    code = "from torch_aclnn_ops import _torch_npu; print(*map(_torch_npu._find, ('folder', 'package', 'torch')))"
    result = run_python("-c", code, cwd=tmp_path)
    assert result.stdout == f"None None {torch.__file__}\n", result.stderr


# Lets CANN's libraries be found, so that torch_npu is imported.
WITH_CANN = (
    "import ctypes; CDLL = ctypes.CDLL\n"
    f"ctypes.CDLL = lambda name, *a, **k: name in {_torch_npu._CANN_LIBRARIES} or CDLL(name, *a, **k)"
)


def test_torch_npu_and_torch_are_imported_from_their_installation(hostile, installed):
    result = run_python("-c", f"{WITH_CANN}\n{REASON}", cwd=hostile, path=[installed])
    assert result.stdout == "imported\nNone True\n", result.stderr


@needs_compiler
def test_the_host_npu_loads_nothing_from_the_working_directory(hostile, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from torch_aclnn_ops import functional, launches; import torch\n"
        "one = torch.ones(3, device='npu', requires_grad=True); functional.mse_loss(one, one.detach()).backward()\n"
        "print(one.grad.tolist(), launches()['aclnnMseLossBackward'])\n"
    )
    result = run_python("-m", "host_npu", program, cwd=hostile, LD_LIBRARY_PATH=":")
    assert result.stdout == "[0.0, 0.0, 0.0] 1\n", result.stderr


def test_the_folder_of_this_package_counts_as_an_installation_folder(installed):
    shutil.copytree(PACKAGE, installed / "torch_aclnn_ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    result = run_python("-c", f"{WITH_CANN}\n{REASON}", cwd=installed, path=["."])
    assert result.stdout == "imported\nNone True\n", result.stderr


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """Run the extension's search for CANN in a program without torch_npu, whose own search would come first."""
    folder = tmp_path_factory.mktemp("search")
    source = folder / "search.cpp"
    source.write_text(
        """
        #include <dlfcn.h>
        #include <iostream>
        #include "symbols.h"

        int main() {
            using namespace torch_aclnn_ops;
            Dl_info info;
            if (find_symbol("aclnnNothing") != nullptr || dladdr(find_symbol("aclnnMseLossBackward"), &info) == 0) {
                return 1;
            }
            std::cout << info.dli_fname << std::endl;
        }
        """
    )
    torch_folder = Path(torch.__file__).parent
    npu_include = _torch_npu.library().parents[1] / "include"
    includes = [ROOT / "csrc" / "npu", torch_folder / "include", npu_include, npu_include / "third_party/acl/inc"]
    libraries = torch_folder / "lib"
    program = folder / "search"
    command = ["g++", "-std=c++20", str(source), str(ROOT / "csrc" / "npu" / "symbols.cpp")]
    command += [*(f"-I{folder}" for folder in includes), f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ldl"]
    subprocess.run([*command, "-o", str(program)], check=True)

    def run(environment, cwd=None):
        result = subprocess.run(
            [program], env={**os.environ, **environment}, cwd=cwd, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    return run


@needs_compiler
def test_custom_vendor_and_split_libraries_are_searched_in_order(tmp_path, search):
    # A copy of the simulated operators in each folder where CANN's may be.
    places = {
        "custom": tmp_path / "custom" / "op_api" / "lib" / "libcust_opapi.so",
        "vendor": tmp_path / "opp" / "vendors" / "one" / "op_api" / "lib" / "libcust_opapi.so",
        "split": tmp_path / "cann" / "lib64" / "libopapi_nn.so",
    }
    for place in places.values():
        place.parent.mkdir(parents=True)
        shutil.copy(LIBRARIES / "libopapi.so", place)
    (tmp_path / "opp" / "vendors" / "config.ini").write_text("[section]\nload_priority = none, one\n")
    settings = {
        "ASCEND_CUSTOM_OPP_PATH": f"{tmp_path / 'nowhere'}:{tmp_path / 'custom'}",
        "ASCEND_OPP_PATH": str(tmp_path / "opp"),
        "ASCEND_HOME_PATH": str(tmp_path / "cann"),
    }
    found = []
    for _ in range(len(settings) + 1):
        environment = {"LD_LIBRARY_PATH": str(LIBRARIES), **settings}
        found.append(search(environment))
        settings.pop(next(iter(settings), ""), None)
    assert found == [*map(str, places.values()), str(LIBRARIES / "libopapi.so")]


@needs_compiler
def test_split_libraries_are_searched_in_the_order_of_their_names(tmp_path, search):
    folder = tmp_path / "lib64"
    folder.mkdir()
    libraries = [folder / f"libopapi_{letter}.so" for letter in "kcgaibhdfjle"]
    source = 'extern "C" void aclnnMseLossBackward() {}\n'
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(libraries[0])]
    subprocess.run(command, input=source, text=True, check=True)
    for library in libraries[1:]:
        shutil.copy(libraries[0], library)
    environment = {"ASCEND_HOME_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(LIBRARIES)}
    assert search(environment) == str(folder / "libopapi_a.so")


@needs_compiler
def test_the_search_ignores_libraries_in_the_working_directory(hostile, search):
    shutil.copy(hostile / "libopapi.so", hostile / "libaclnn_math.so")
    for dependency in ("libascendcl.so", "libnnopbase.so"):  # which the loader itself looks for
        (hostile / dependency).unlink()
    found = search({"LD_LIBRARY_PATH": f".:{LIBRARIES}:"}, cwd=hostile)
    assert found == str(LIBRARIES / "libopapi.so")


@needs_compiler
def test_the_search_ignores_relative_and_writable_custom_packages(hostile, search):
    package = hostile / "op_api" / "lib" / "libcust_opapi.so"
    package.parent.mkdir(parents=True)
    shutil.copy(hostile / "libopapi.so", package)
    environment = {"LD_LIBRARY_PATH": str(LIBRARIES)}
    assert search({**environment, "ASCEND_CUSTOM_OPP_PATH": "."}, cwd=hostile) == str(LIBRARIES / "libopapi.so")
    package.chmod(0o777)
    found = search({**environment, "ASCEND_CUSTOM_OPP_PATH": str(hostile)}, cwd=hostile)
    assert found == str(LIBRARIES / "libopapi.so")
    package.chmod(0o755)
    assert "hostile" in search({**environment, "ASCEND_CUSTOM_OPP_PATH": str(hostile)}, cwd=hostile)
