"""What hccl_functions.md says of every function of HCCL that torch_npu looks up."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from host_npu import _libraries, _torch_npu, testing

from tests import _hccl_calls

ROOT = Path(__file__).parents[1]
PAGE = ROOT.joinpath("tests/hccl_functions.md").read_text()
# By function: what becomes of it, and the test that shows it.
TABLE = {
    function: (kind, test)
    for functions, kind, test in re.findall(
        r"^\| ((?:`Hc\w+`(?:, )?)+) \|[^|]*\| ([^|]*) \| (.*) \|$", PAGE, re.MULTILINE
    )
    for function in re.findall(r"\w+", functions)
}
REFUSED = [function for function, (kind, _) in TABLE.items() if kind == "refused"]
# They are called with the environment or at the moment that the key says.
SPECIAL = {
    "a rank table": {"HcclCommInitClusterInfoConfig", "HcclCreateSubCommConfig"},
    "several roots": {"HcclGetRootInfoScalable", "HcclCommInitRootInfoScalable"},
    "always": {"HcclGetCommConfigCapability", "HcclGetCommAsyncError"},
    "never by a group": {"HcclCommInitAll", "HcclCommInitRootInfo"},
}
needs_functions_of_the_table = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="torch_npu 2.9 has fewer functions than that of the table"
)
SCALABLE = {"ROOTINFO_SCALABLE_ENABLE": "1", "TORCH_HCCL_RANKS_PER_ROOT": "1"}


def _exported():
    found = []
    for name in ("hccl", "hcomm"):
        symbols = subprocess.run(
            ["nm", "-D", "--defined-only", _libraries._path(name)], capture_output=True, text=True, check=True
        )
        found += re.findall(r" T (Hc\w+)", symbols.stdout)
    return found


def _bound():
    """Return the names of functions in torch_npu's library; it also has names of its own that begin as these do."""
    folder = _torch_npu.folder()
    headers, library = folder / "include", folder / "lib" / "libtorch_npu.so"
    declarations = "".join(
        (headers / path).read_text()
        for path in ("third_party/hccl/inc/hccl/hccl.h", "torch_npu/csrc/distributed/HcclCompile.h")
    )
    declared = set(re.findall(r"\b(Hc(?:cl|omm)[A-Z]\w+)\(|(?:libhcomm, |FUNCTION\()(Hc\w+)\)", declarations))
    names = {name.decode() for name in re.findall(rb"\0(Hc(?:cl|omm)[A-Z]\w+)(?=\0)", library.read_bytes())}
    return names & {name for pair in declared for name in pair}


def test_the_table_has_every_function_that_torch_npu_looks_up():
    if "HcclCommSymWinRegister" not in _bound():
        pytest.skip("another version of torch_npu than the table's")
    assert TABLE.keys() == _bound()


def test_what_can_be_reached_is_exported():
    assert {function for function in TABLE if not function.startswith("Hcomm")} <= set(_exported())


@pytest.mark.parametrize(("file", "name"), sorted(set(re.findall(r"`(test_\w+)` `(\w+)`", PAGE))))
def test_each_row_names_a_test(file, name):
    assert f"def test_{name}(" in ROOT.joinpath("tests", f"{file}.py").read_text()


@pytest.fixture(scope="module")
def called():
    """Which functions each call of torch makes, by rank."""
    return testing.run(_hccl_calls.functions, 2, device="npu")


@needs_functions_of_the_table
def test_calls_of_torch_reach_the_functions_of_the_table(called):
    assert not [error for of_rank in called for _, error in of_rank.values() if error]
    by_calls = {name for of_rank in called for names, _ in of_rank.values() for name in names}
    scalable = testing.run(_hccl_calls.functions, 2, device="npu", environment=SCALABLE)
    roots = {name for of_rank in scalable for names, _ in of_rank.values() for name in names}
    simulated = {name for name, (kind, _) in TABLE.items() if kind == "simulated"}
    assert by_calls - SPECIAL["always"] == simulated - set().union(*SPECIAL.values())
    assert roots - by_calls - SPECIAL["always"] == SPECIAL["several roots"]


@needs_functions_of_the_table
def test_a_rank_table_is_refused_and_root_infos_serve(tmp_path, called):
    table = tmp_path / "table.json"
    table.write_text('{"version": "1.0", "server_count": "1", "server_list": [], "status": "completed"}')
    found = testing.run(_hccl_calls.functions, 2, device="npu", environment={"RANK_TABLE_FILE": str(table)})
    for of_rank, without in zip(found, called, strict=True):
        names, others = ({name for made, _ in each.values() for name in made} for each in (of_rank, without))
        assert names - others - SPECIAL["always"] == SPECIAL["a rank table"]
        assert not [error for _, error in of_rank.values() if error]


@pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA's _scatter of torch comes before torch_npu's")
def test_devices_of_one_process_copy_to_each_other():
    [(found, expected, called)] = testing.run(_hccl_calls.copies, 1, device="npu", devices=2, backend="")
    torch.testing.assert_close(found, expected)
    assert {"HcclCommInitAll", "HcclBroadcast"} <= set(called)


def test_what_is_refused_says_so():
    [found] = testing.run(_hccl_calls.answers, 1, REFUSED, device="npu", backend="")
    for function, (status, message) in found.items():
        assert status == 5, function
        assert message.startswith(f"EZ9999: {function}: the host NPU does not simulate ")


def test_what_has_no_status_is_answered():
    [found] = testing.run(_hccl_calls.answers, 1, ["HcclGetCommConfigCapability"], device="npu", backend="")
    capability, message = found["HcclGetCommConfigCapability"]
    assert capability == 12 and not message  # HCCL_COMM_CONFIG_RESERVED


def test_the_allocator_of_hccl_wants_another_cann():
    [found] = testing.run(_hccl_calls.allocator, 1, device="npu")
    # The second is torch_npu 2.9's answer.
    sentences = ("HCCL mem allocator requires CANN 9.2.0 or later", "Backend hccl does not support getMemAllocator")
    assert found.startswith(sentences)
