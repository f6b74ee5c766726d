"""The simulated operators through CANN's C interface only: a C++ program of test cases, one test each.

The program uses the headers of the wheel, of ``host-npu/csrc/include`` and of the operators, and links the simulated
libraries. A case states the chips on which it runs; the program runs once for each, and once without the cache of phase
one.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from host_npu import _libraries

from tests import _c_program, fuzz, sanitizers

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(scope="module")
def program() -> Path:
    (program,) = _c_program.compiled(["g++"], [_c_program.shared(_libraries.FOLDER)])
    return program


@pytest.fixture(scope="module")
def results(program: Path) -> dict[str, list[str]]:
    """Return the program's result for each case."""
    return _c_program.results([str(program)])


@pytest.mark.parametrize("name", [*_c_program.names(), _c_program.LAST])
def test_case(name: str, results: dict[str, list[str]]):
    said = results.get(name, ["it did not run"])
    assert set(said) == {"ok"}, "\n".join(said)


@pytest.mark.parametrize("number", [2, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_threads_on_two_devices_do_not_disturb_each_other(program: Path, number: int):
    # `make tsan` also detects races that cause no failure here.
    said = {one for each in sanitizers.threads(program, number).values() for one in each}
    assert said == {"ok"}, "\n".join(said)


SANITIZERS = pytest.param("address,undefined", id="with sanitizers", marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=[pytest.param("", id="as built"), SANITIZERS])
def fuzzed(request, tmp_path_factory) -> dict[str, int]:
    """Return the number of launches of each operator in 20,000 fuzzer inputs, with sanitizers for object lifetimes."""
    libraries = _libraries.FOLDER
    if request.param:
        libraries = _c_program.instrumented(request.param, names=("ascendcl", "acl_op_compiler", "nnopbase"))
        # Compiling the operators again would take most of the time of these tests; `make asan` and `make fuzz` do it.
        shutil.copy(_libraries.FOLDER / "libopapi.so", libraries)
    program = fuzz.target(["g++"], libraries, "standalone.cpp", checks=request.param)
    seeds = fuzz.write_seeds(tmp_path_factory.mktemp("seeds"))
    result = subprocess.run([program, "20000", *seeds], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["launches"]


def test_twenty_thousand_random_inputs_of_the_fuzzer_do_no_harm(fuzzed: dict[str, int]):
    assert sum(fuzzed.values()) > 1000


def test_the_fuzzer_launches_every_operator(fuzzed: dict[str, int]):
    assert fuzzed.keys() == _c_program.OPERATORS.keys()
