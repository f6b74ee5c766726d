"""Matrix products with a collective on two simulated NPUs: results in float64, refusals, and ranks that disagree."""

import re
import signal
from functools import cache

import pytest
import torch
from host_npu import testing

from tests import _collective_matmuls as programs

_RAISES = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0", "HCCL_ASYNC_ERROR_HANDLING": "0"}
# Do not kill the other ranks: the tests check each rank's message after another rank has failed.
_OPTIONS = {"environment": _RAISES, "timeout": 60, "grace": 60}


@cache
def _errors(dtype):
    return testing.run(programs.errors, 2, dtype, device="npu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", programs.CASES)
def test_the_result_is_that_of_float64_but_for_the_roundings(case, dtype):
    for errors in _errors(dtype):
        assert isinstance(errors[case], float), errors[case]
        assert errors[case] <= 1


def test_calls_on_two_streams_are_those_of_the_other_rank_in_their_order():
    for ratios in testing.run(programs.on_two_streams, 2, device="npu"):
        assert max(ratios) <= 1


_TWO = 'the communicator "group_name_0" 2 ranks'
# The message of each refusal.
REFUSED = {
    "unknown group": 'group is "nowhere", which is not a communicator of this process; it has "group_name_0"',
    "float32": "x1 has dtype float32 instead of float16 or bfloat16",
    "maximum": 'reduceOp is "max"; it can be "sum" only',
    "turns": "commTurn is 2; it can be 0 only",
    "world_size of all_gather": f"output has 16 rows instead of 8: x1 has 4 and {_TWO}",
    "world_size of reduce_scatter": f"output has 2 rows instead of 4: x1 has 8 and {_TWO}",
    "rows": 'x1 has 7 rows, which cannot be divided among the 2 ranks of the communicator "group_name_0"',
    "few columns": "x1 has 8 columns; it can have 256 to 65534",
    "captured": "the host NPU does not capture aclnnMatmulAllReduce",
    "no group after a refusal": 'group is "left", which is not a communicator',
}


@cache
def _refusals():
    return testing.run(programs.refusals, 2, device="npu")


@pytest.mark.parametrize("case", programs.REFUSED)
def test_what_is_not_possible_is_refused_by_a_sentence_and_the_ranks_go_on(case):
    for refusals in _refusals():
        assert REFUSED[case] in refusals[case]


def test_a_group_that_was_left_is_refused_although_the_call_was_made_before():
    for refusal in testing.run(programs.after_its_group, 2, device="npu"):
        assert "which is not a communicator of this process" in refusal


_FIRST = "call 2 of communicator group_name_0: rank 1 called"
# The message on all ranks.
DISAGREEMENTS = {
    programs.beside_a_plain_collective: (
        f"{_FIRST} AllReduce(count=8, fp16, sum) where rank 0 called MatmulAllReduce(count=8, fp16, sum)"
    ),
    programs.of_other_rows: (
        f"{_FIRST} MatmulReduceScatter(count=6, fp16, sum) where rank 0 called MatmulReduceScatter(count=4, fp16, sum)"
    ),
}


@pytest.mark.parametrize("program", DISAGREEMENTS, ids=lambda program: program.__name__)
def test_ranks_that_disagree_are_all_told_what_each_has_called(program):
    for outcome in testing.outcomes(program, 2, device="npu", **_OPTIONS):
        assert outcome.exit_status == 1
        assert DISAGREEMENTS[program] in f"{outcome.error}\n{outcome.output}"


def test_a_rank_whose_partner_has_died_is_told_so():
    waiting, killed = testing.outcomes(programs.beside_a_killed_rank, 2, device="npu", **_OPTIONS)
    assert (waiting.exit_status, killed.exit_status) == (1, -signal.SIGKILL)
    said = re.sub(r"process \d+", "process N", f"{waiting.error}\n{waiting.output}")
    assert (
        "rank 1 (process N) died: rank 0 waited for it in call 2, AllGatherMatmul(count=1024, fp16),"
        " of communicator group_name_0" in said
    )
