"""Let every call of every simulated function fail, one at a time: ``python -m host_npu -m tests.faults MODE``.

Which functions a case calls, and how often, the host NPU says. For each of these calls the case is done once, with that
call failing. Afterwards one exception was raised, or none and the result is right; nothing is alive that was not
before; and the case, done again, gives the right result. What torch_npu spoils is in ``KNOWN``, with the reason.

A case runs in a process of its own, which is forked from one that has loaded torch_npu and not used it. A failure after
which the process is not as before ends it, and the next one goes on with a new one. One that gives no answer hangs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_aclnn_ops import ops

import host_npu
import torch

from tests._fault_cases import Case, Disturbed, cases

Fault = tuple[str, int]  # a function, and which of its calls
MODES: dict[str, dict[str, str]] = {
    "TASK_QUEUE_ENABLE=0": {"TASK_QUEUE_ENABLE": "0"},
    "TASK_QUEUE_ENABLE=1": {"TASK_QUEUE_ENABLE": "1"},
    "TASK_QUEUE_ENABLE=2": {"TASK_QUEUE_ENABLE": "2"},
    "ASCEND_LAUNCH_BLOCKING=1": {"ASCEND_LAUNCH_BLOCKING": "1"},
}
SECONDS = 120.0  # without an answer, until a process is taken to hang
OURS = "|".join(getattr(ops, name).cann for name in ops.__all__)
NOT_REACHED = "not reached"
ENDS = "the queue ends, which the next operator says"
NOT_DESTROYED = "no exception, handle not destroyed"
EXPECTED = ("one exception", "no exception", NOT_DESTROYED, NOT_REACHED)


@dataclass(frozen=True)
class Outcome:
    """What came of a failure.

    Attributes:
        kind: of the case.
        case: its name.
        function: the function that failed.
        nth: in which of its calls.
        seen: what was seen.
        raised: the first line of the exception.
    """

    kind: str
    case: str
    function: str
    nth: int
    seen: str
    raised: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.case}, {self.function} call {self.nth}: {self.seen} ({self.raised})"


@dataclass(frozen=True)
class Known:
    """Failures that torch_npu itself cannot handle.

    Attributes:
        modes: pattern of the modes in which it happens.
        functions: pattern of the functions whose failure it follows.
        seen: pattern of what is seen.
        raised: pattern of the first line of what is raised.
        reason: why it is torch_npu's.
        cases: pattern of the cases in which it happens.
    """

    modes: str
    functions: str
    seen: str
    raised: str
    reason: str
    cases: str = r".*"

    def explains(self, mode: str, outcome: Outcome) -> bool:
        """Return whether it is about this outcome."""
        patterns = (self.modes, self.functions, self.seen, self.raised, self.cases)
        texts = (mode, outcome.function, outcome.seen, outcome.raised, outcome.case)
        return all(re.fullmatch(pattern, text) for pattern, text in zip(patterns, texts, strict=True))


KNOWN = (
    Known(
        r"TASK_QUEUE_ENABLE=[12]",
        r".*",
        f"one exception, {ENDS}",
        r".*",
        "A failure on the thread of torch_npu's task queue ends the queue: one exception is raised, and torch_npu"
        " then drops everything that is enqueued, as on a device. There, this package's operators raise from then"
        " on, while torch_npu's own return silently; on the host NPU every operator and every read raises.",
    ),
    Known(
        r"TASK_QUEUE_ENABLE=[12]",
        r".*",
        r"(?s)no exception, then another: The Inner error is reported as above\..*",
        r"",
        "torch_npu's thread empties its queue before it notes that an operator has failed. A"
        " torch.npu.synchronize() in between returns as if nothing had failed, and the next call raises. Seen once"
        " in 56,000 failures.",
    ),
    Known(
        r"TASK_QUEUE_ENABLE=[12]",
        r".*",
        r"the process hangs, in a wait for an eventfd",
        r"",
        "Before a copy, torch_npu waits on an eventfd until its queue is empty (NPUStream::stream). If the queue's"
        " thread ends at that moment, nothing wakes the waiting thread: a race that is lost once in some thousand"
        " failures of the queue.",
    ),
    Known(
        r".*",
        r".*",
        r"one exception, and left: \d+ aclTensor",
        rf"(?!({OURS}): |torch_aclnn_ops).*",
        "An exception in one of torch_npu's own operators leaks the aclTensors that it has created.",
    ),
    Known(
        r".*",
        r"aclCreateTensor",
        "no exception, then the result is wrong without an exception",
        r"",
        "torch_npu's own forward of the weighted binary_cross_entropy does not check whether aclCreateTensor"
        " returned a tensor, and to CANN a null pointer means no weight.",
        r"binary_cross_entropy, weighted.*|BCELoss",  # a module with a weight
    ),
    Known(
        r"ASCEND_LAUNCH_BLOCKING=1",
        r"aclmdlRICaptureGetInfo|aclrtSynchronizeStreamWithTimeout",
        r"one exception, then parameter \d+ is partially updated",
        r"(?s)((currentStreamC|c)aptureStatusMayInitCtx|RunOpApiV2:).*",
        "With blocking launches torch_npu first asks whether a graph is being captured, and then waits for the"
        " operator. If one of the two calls fails, the operator has run already, although the exception looks as if"
        " it had not: a step count, or moments, may be one step ahead of their parameter.",
    ),
    Known(
        r".*",
        r"HcclGetCommAsyncError|aclrtQueryEventStatus",
        r"(?s)the process ends by SIGABRT: .*HCCL watchdog thread terminated with exception.*",
        r"",
        "A thread of torch_npu's process group checks once a second whether its work has failed. A failure there"
        " ends the process, as on a device.",
    ),
    Known(
        r".*",
        r"aclrtSetDevice|aclrtDestroyEvent|aclrtRecordEvent|aclrtStreamWaitEvent",
        rf"no exception, then another: FORCE STOP\.|no exception, {ENDS}|(one|no) exception, and left: \d+ aclrtEvent",
        r"(LaunchRecordTask.*)?",
        "Failures on a thread of torch_npu's process group, or where it waits for or destroys an event, are"
        " reported late or not at all.",
    ),
    Known(
        r".*",
        r"aclrtSynchronizeStreamWithTimeout",
        r"one exception, then another: trying to initialize the default process group twice!",
        r"synchronize:.*",
        "torch_npu waits for its streams before a process group is destroyed. If that raises, torch keeps the group.",
    ),
)


def _in_child(work: Callable[[Callable[[Any], None]], None]) -> Iterator[Any]:
    """Run work in a separate process; yield its reports and, if it failed, its exit status."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as printed:
        process = os.fork()
        if process == 0:
            os.close(reading)
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            status = 1
            try:
                work(lambda message: os.write(writing, json.dumps(message).encode() + b"\n") and None)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as answers:
            unread = b""
            while select.select([answers], [], [], SECONDS)[0]:
                read = answers.read(65536)
                if not read:
                    break
                *lines, unread = (unread + read).split(b"\n")
                yield from map(json.loads, lines)
            else:
                waits = _waits_for_an_eventfd(process)
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                yield "the process hangs" + (", in a wait for an eventfd" if waits else "")
                return
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status != 0:
            printed.seek(0)
            end = printed.read().decode(errors="replace").strip()[-1000:]
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            yield f"the process ends by {how}: {end}"


def _waits_for_an_eventfd(process: int) -> bool:
    """Return whether the first thread of a process is in a system call whose first argument is an eventfd."""
    _, *arguments = Path(f"/proc/{process}/syscall").read_text().split()
    try:
        return "eventfd" in os.readlink(f"/proc/{process}/fd/{int(arguments[0], 16)}")
    except (IndexError, OSError):  # it runs, or the argument is no descriptor
        return False


def _alive() -> Counter[str]:
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    stats = host_npu.stats()
    return Counter({**stats.alive, "bytes": sum(stats.device_bytes.values())})


def _count_calls(case: Case) -> dict[str, int]:
    disturbed = case.start()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    host_npu.count_calls()
    disturbed.act()
    torch.npu.synchronize()
    return host_npu.stats().calls


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _end_of_queue() -> str | None:
    """Return what comes of a copy that only torch_npu's queue can do, or ``None`` if it is done."""
    source = torch.tensor([float(os.getpid()), 0.0, 2.0, 0.0])
    try:
        target = torch.zeros(2).npu()
        target.copy_(source.npu()[::2])
        is_right = target.tolist() == [float(os.getpid()), 2.0]
    except RuntimeError as error:
        if "task queue has ended" not in str(error):
            raise
        return ENDS
    return None if is_right else "the queue ends and nothing says so"


def _fail(disturbed: Disturbed, function: str, nth: int) -> tuple[BaseException | None, bool]:
    """Do something in which a call fails; return what that raises, and whether the call was made."""
    torch.npu.empty_cache()  # so that memory is allocated
    host_npu.fail(function, nth)
    error: BaseException | None = None
    try:
        disturbed.act()
        torch.npu.synchronize()
    except Exception as caught:
        error = caught
    was_reached = not host_npu.stats().pending_failures
    host_npu.reset()
    if error is None:
        try:
            torch.npu.synchronize()  # the queue may tell of it only now
        except Exception as caught:
            error = caught
    return error, was_reached


def _outcome(disturbed: Disturbed, fault: Fault) -> tuple[str, str]:
    """Let a call fail; return what came of it, and what was raised."""
    error, was_reached = _fail(disturbed, *fault)
    raised = "" if error is None else _first_line(error)
    if not was_reached:
        return NOT_REACHED, raised
    outcome = "no exception" if error is None else "one exception"
    try:
        if end := _end_of_queue():
            return f"{outcome}, {end}", raised
        lost = disturbed.lost(error)
    except Exception as second:
        if "task queue has ended" in str(error):  # the host NPU knew of it before torch_npu
            return f"{outcome}, {ENDS}", raised
        return f"{outcome}, then another: {_first_line(second)}", raised
    return f"{outcome}, then {lost}" if lost else outcome, raised


def _attempt(case: Case, fault: Fault) -> tuple[str, str]:
    disturbed = case.start()
    before = _alive()
    outcome, raised = _outcome(disturbed, fault)
    del disturbed
    if outcome not in ("one exception", "no exception"):
        return outcome, raised
    deadline = time.monotonic() + 5
    try:
        left = _alive() - before  # of what is there more than before
        while left["bytes"] and time.monotonic() < deadline:
            left = _alive() - before  # a thread of autograd may not have let go of its tensors yet
    except Exception as error:
        return f"{outcome}, then another: {_first_line(error)}", raised
    if outcome == "no exception" and re.search("Destroy|Free", fault[0]) and left.total() == 1:
        outcome = NOT_DESTROYED
    elif left:
        outcome += ", and left: " + ", ".join(f"{count} {kind}" for kind, count in sorted(left.items()))
    return outcome, raised


def _attempt_all(case: Case, faults: list[Fault], tell: Callable[[Any], None]) -> None:
    warnings.simplefilter("ignore")
    # What is made once and kept is there then.
    case.start().act()
    _end_of_queue()
    for fault in faults:
        outcome, raised = _attempt(case, fault)
        tell([outcome, raised])
        # What only left something is followed by the next: each counts from what is there before it.
        if outcome != NOT_REACHED and not re.fullmatch(r"(one|no) exception(, and .*)?", outcome):
            return


def run(mode: str, chosen: list[Case], every: int) -> tuple[int, list[str]]:
    """Let functions fail in cases; return how many did, and what came of it that nothing explains.

    Args:
        mode: how this process's operators are launched, one of ``MODES``.
        chosen: the cases.
        every: of the calls that can fail, take every n-th.
    """
    import torch._dynamo  # which an optimizer imports, and every child would take seconds for it

    torch.set_num_threads(1)  # tiny tensors wait for threads longer than they work
    gc.collect()
    gc.freeze()  # what was imported is not looked at again in every trial
    unexplained, profiles, taken, failures = [], set(), 0, 0
    for case in chosen:
        [calls, *_] = _in_child(lambda tell, case=case: tell(_count_calls(case)))
        if not isinstance(calls, dict):
            if "does not simulate" not in calls:
                unexplained.append(f"{case.kind}, {case.name}, no fault: {calls}")
            continue
        profile = (case.kind, case.group or case.name, json.dumps(calls, sort_keys=True))
        if profile in profiles:
            continue
        profiles.add(profile)
        faults = [(function, nth + 1) for function, number in calls.items() for nth in range(number)]
        todo = [fault for i, fault in enumerate(faults, taken) if i % every == 0]
        taken += len(faults)
        failures += len(todo)
        while todo:
            for answer in _in_child(lambda tell, case=case, todo=tuple(todo): _attempt_all(case, todo, tell)):
                seen, raised = answer if isinstance(answer, list) else (answer, "")
                outcome = Outcome(case.kind, case.name, *todo.pop(0), seen, raised)
                if seen not in EXPECTED and not any(known.explains(mode, outcome) for known in KNOWN):
                    unexplained.append(str(outcome))
    return failures, unexplained


def main() -> None:
    """Run the cases in a mode, which the environment of the process has set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--every", type=int, default=1, help="of the calls that can fail, take every n-th")
    parser.add_argument("--only", default="", help="pattern of the cases to run")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if re.search(arguments.only, f"{case.kind}: {case.name}")]
    failures, unexplained = run(arguments.mode, chosen, arguments.every)
    print("\n".join([*unexplained, f"{failures} failures, {len(unexplained)} unexplained"]), flush=True)
    sys.exit(bool(unexplained) or not failures)


if __name__ == "__main__":
    main()
