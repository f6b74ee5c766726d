"""Collectives of simulated NPUs: their results, and their errors when ranks disagree, wait or die."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from host_npu import testing

from tests import _failing_collectives as programs
from tests import collectives


# `python -m tests.collectives` makes 10,000 calls, in groups of 1 to 4 ranks.
@pytest.mark.parametrize(("world_size", "devices"), [(2, 1), pytest.param(3, 4, marks=pytest.mark.exhaustive)])
def test_random_collectives_have_the_results_of_their_definition(world_size, devices):
    found = testing.run(collectives.compare, world_size, 0, 150, device="npu", devices=devices)
    assert [difference for _, differences in found for difference in differences] == []
    assert all(found[0][0][name] for name in collectives.COLLECTIVES)


def _averages(device, dtype):
    """Return the averages of two ranks' integers from all_reduce and reduce_scatter_tensor."""
    rank = dist.get_rank()
    values = [[7, 0, 5, 2], [0, 1, 5, 3]][rank]
    if dtype.is_signed:
        values = [-value for value in values[:2]] + values[2:]
    reduced = torch.tensor(values, dtype=dtype, device=device)
    own = torch.empty(2, dtype=dtype, device=device)
    if dtype != torch.uint8:  # refused by torch_npu's reduce_scatter
        dist.reduce_scatter_tensor(own, reduced.clone(), dist.ReduceOp.AVG)
    dist.all_reduce(reduced, dist.ReduceOp.AVG)
    return reduced.tolist(), own.tolist()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=str)
def test_an_average_of_integers_has_no_fraction(dtype):
    sign = -1 if dtype.is_signed else 1
    expected = [sign * 3, 0, 5, 2]
    for rank, (reduced, own) in enumerate(testing.run(_averages, 2, dtype, device="npu")):
        assert reduced == expected
        assert dtype == torch.uint8 or own == expected[2 * rank : 2 * rank + 2]


def _division_in_place(device):
    """Return the error of a program's own integer division."""
    try:
        torch.ones(2, dtype=torch.int32, device=device).div_(2)
    except RuntimeError as error:
        return str(error)
    return None


def test_a_program_cannot_divide_integers_in_place():
    (message,) = testing.run(_division_in_place, 1, device="npu")
    assert message == "result type Float can't be cast to the desired output type Int"


def _messages_to_all(device):
    """Return what a rank has received from every rank, including itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.zeros(3, device=device) for _ in range(size)]
    operations = []
    for peer in range(size):
        operations.append(dist.P2POp(dist.irecv, received[peer], peer))
        operations.append(dist.P2POp(dist.isend, torch.full((3,), 10.0 * rank + peer, device=device), peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [each.tolist() for each in received]


def test_a_rank_may_send_to_itself_in_a_batch_of_messages():
    found = testing.run(_messages_to_all, 2, device="npu")
    assert found == [[[10.0 * sender + rank] * 3 for sender in range(2)] for rank in range(2)]


def _async_error_handling(value):
    # The second name is that of torch_npu 2.9.
    return {"TORCH_HCCL_ASYNC_ERROR_HANDLING": value, "HCCL_ASYNC_ERROR_HANDLING": value}


# With error handling, a thread of torch_npu may end the process before the exception is raised; a separate test is
# below.
RAISES = _async_error_handling("0")
# For programs that wait in vain. In the others, a busy machine may delay a rank.
_LIMITS = {"HCCL_EXEC_TIMEOUT": "3", "HCCL_CONNECT_TIMEOUT": "3"}
ALL_REDUCE = "AllReduce(count=8, fp32, sum)"
WAITED = (
    f"rank 0 waited for it in call 2, {ALL_REDUCE}, of communicator group_name_0;"
    f" rank 1 was last in call 1, {ALL_REDUCE}"
)
_SPLITS = "AlltoAllV(send_counts=[{}], receive_counts=[4, 4], fp32)"

# The message on every rank.
DISAGREEMENTS = {
    "other_function": f"rank 1 called Broadcast(count=8, fp32, root=0) where rank 0 called {ALL_REDUCE}",
    "other_count": f"rank 1 called AllReduce(count=7, fp32, sum) where rank 0 called {ALL_REDUCE}",
    "other_dtype": f"rank 1 called AllReduce(count=8, fp16, sum) where rank 0 called {ALL_REDUCE}",
    "other_operation": f"rank 1 called AllReduce(count=8, fp32, max) where rank 0 called {ALL_REDUCE}",
    "other_root": (
        "rank 1 called Broadcast(count=8, fp32, root=1) where rank 0 called Broadcast(count=8, fp32, root=0)"
    ),
    "other_splits": (
        f"rank 1 called {_SPLITS.format('3, 5')}, which sends 3 elements to rank 0,"
        f" where rank 0 called {_SPLITS.format('4, 4')}, which expects 4"
    ),
    "shorter_message": (
        "rank 1 called Recv(count=8, fp32, from rank 0) where rank 0 called Send(count=5, fp32, to rank 1)"
    ),
}
_MESSAGE = "message 1 from rank 0 to rank 1 of communicator hccl_N"
# The message on rank 0, and rank 1's exit status.
ABSENCES = {
    "never_calls": (f"rank 1 (process N) did not come within 3 s: {WAITED}", 1),
    "never_makes_the_communicator": (
        "HcclCommInitRootInfoConfig: rank 1 did not come within 3 s:"
        " rank 0 waited for it to make communicator group_name_0",
        1,
    ),
    "is_killed": (f"rank 1 (process N) died: {WAITED}", -signal.SIGKILL),
    "leaves": (f"rank 1 (process N) has destroyed the communicator: {WAITED}", 1),
}


def _outcomes(program, **environment):
    # Do not kill the other ranks: the tests check each rank's message after another rank has failed.
    options = {"environment": RAISES | environment, "timeout": 60, "grace": 60}
    found = testing.outcomes(getattr(programs, program), 2, device="npu", **options)
    assert not [name for name in os.listdir("/dev/shm") if "hccl" in name or "host_npu" in name]
    return found


def _said(outcome):
    text = f"{outcome.error}\n{outcome.output}"
    return re.sub(r"hccl_\d+", "hccl_N", re.sub(r"process \d+", "process N", text))


@pytest.mark.parametrize("program", DISAGREEMENTS)
def test_ranks_that_disagree_are_all_told_what_each_has_called(program):
    where = _MESSAGE if program == "shorter_message" else "call 2 of communicator group_name_0"
    for outcome in _outcomes(program):
        assert outcome.exit_status == 1
        assert f": {where}: {DISAGREEMENTS[program]}\n" in _said(outcome)


def test_an_operation_that_the_chip_does_not_have_names_the_dtype():
    for outcome in _outcomes("product_of_bfloat16"):
        assert "HcclAllReduce: this chip has no prod of bf16 between ranks\n" in _said(outcome)


READS = [
    "reads_a_number",
    "copies_to_pinned_memory",
    "reads_what_another_stream_made_of_it",
]


@pytest.mark.parametrize("program", READS)
def test_the_first_read_after_a_failed_collective_raises(program):
    for outcome in _outcomes(program):
        assert (outcome.exit_status, outcome.value) == (1, None)
        assert f": call 2 of communicator group_name_0: {DISAGREEMENTS['other_count']}" in _said(outcome)


def test_the_constructor_of_ddp_does_not_read_what_was_never_gathered():
    # Unwritten memory is -1: "but Rank 0 has 2 params, while rank 1 has inconsistent -1 params."
    alone, _ = _outcomes("makes_a_ddp_model_alone")
    assert "inconsistent" not in _said(alone)
    assert "rank 1 called Broadcast(count=8, fp32, root=0) where rank 0 called AllGather(" in _said(alone)


@pytest.mark.parametrize("program", ABSENCES)
def test_a_rank_whose_partner_is_missing_is_told_which_and_where_it_was_last(program):
    sentence, exit_status = ABSENCES[program]
    waiting, missing = _outcomes(program, **(_LIMITS if program.startswith("never") else {}))
    assert (waiting.exit_status, missing.exit_status) == (1, exit_status)
    assert sentence in _said(waiting)


def test_a_failure_that_was_asked_for_is_told_by_whoever_asks_first_or_by_an_operator_of_this_package():
    waiting, failing = _outcomes("fails_as_asked")
    # There is only one exception. A thread of torch_npu that gets it first drops it or ends the process with it.
    assert failing.exit_status in (1, -signal.SIGABRT)
    sentences = ("EZ9999: HcclAllReduce: failure injected by a test", "torch_npu's task queue has ended")
    assert any(sentence in _said(failing) for sentence in sentences)
    assert f"rank 1 (process N) died: {WAITED}" in _said(waiting)


def test_the_watchdog_of_torch_npu_ends_a_process_whose_collective_has_failed():
    _, late = _outcomes("is_late", **_LIMITS, **_async_error_handling("1"))
    assert late.exit_status == -signal.SIGABRT
    assert f"HCCL watchdog thread terminated with exception: EZ9999: {ABSENCES['never_calls'][0]}" in _said(late)


def test_groups_that_were_left_leave_no_file_thread_or_memory():
    for first, last in testing.run(programs.makes_groups, 2, device="npu"):
        assert first == last
