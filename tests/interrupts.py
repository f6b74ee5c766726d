"""Interrupt and fail the optimizer everywhere, and look for what is lost: ``python -m tests.interrupts --help``.

A trial does one step, or one swap of the averages, in which a signal comes or an operator of torch fails; what fails of
CANN is in :mod:`tests.faults`. Afterwards every parameter must be updated with all that belongs to it, or not at all;
the exception must have said which; and a second call must lead to where a run without a disturbance is, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._figures import write_section
from tests._optim import SETTINGS, STATE, Weights
from tests._signal_points import SignalPoints

Action = Callable[[], None]
Contents = tuple[Tensor, ...]  # of a parameter and its state
WARM_UP = "ema_warmup"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masters": {"dtypes": (torch.bfloat16, torch.bfloat16)},
    "16-bit states": {"dtypes": (torch.bfloat16, torch.float16), "master_weights": False},
    "mixed": {"dtypes": (torch.float32, torch.bfloat16), WARM_UP: "ratio"},
    "flat": {"flatten": True},
    "flat masters": {"dtypes": (torch.bfloat16, torch.bfloat16), "flatten": True},
    "flat mixed": {"dtypes": (torch.float32, torch.bfloat16), "flatten": True, WARM_UP: "ratio"},
    "scaler": {"scaled": True},
    "scaler masters": {"dtypes": (torch.float16, torch.float16), "scaled": True},
    "scaler flat": {"scaled": True, "flatten": True},
    "tensor lr": {"lr": "tensor"},
}


class Failed(RuntimeError):
    """What an injected failure raises."""


class Trainee:
    """A model in two groups, with its optimizer, in front of a step."""

    def __init__(
        self,
        device: str,
        steps: int,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        scaled: bool = False,
        **options: Any,
    ) -> None:
        self.models = [Weights(dtype, seed).to(device) for seed, dtype in enumerate(dtypes)]
        if options.get("lr") == "tensor":
            options["lr"] = torch.tensor(1e-2, device=device)
        groups = [{"params": list(model.parameters())} for model in self.models]
        self.optimizer = FusedEmaAdam(groups, **{**SETTINGS, **options})
        self.scaler = torch.amp.GradScaler(device, init_scale=8.0) if scaled else None
        for step in range(steps):
            self.set_gradients(step)
            self.step()
            self.after_step()
        self.set_gradients(steps)

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for model in self.models for param in model.parameters()]

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for param in self.params:
            grad = torch.randn(param.shape, generator=generator) * (8.0 if self.scaler else 1.0)
            param.grad = torch.empty_like(param).copy_(grad)
        if self.scaler:
            self.scaler.scale(torch.ones((), device=self.params[0].device))

    def step(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()

    def after_step(self) -> None:
        if self.scaler:
            self.scaler.update()

    def contents(self) -> list[Contents]:
        """Return what belongs to each parameter."""
        states = [self.optimizer.state.get(param, {}) for param in self.params]
        names = (*STATE, "master_params")
        return [
            tuple(
                tensor.detach().cpu().clone() for tensor in (param, *(state[name] for name in names if name in state))
            )
            for param, state in zip(self.params, states, strict=True)
        ]


def are_equal(first: Contents, second: Contents) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def is_before(contents: Contents, before: Contents) -> bool:
    """Return whether a parameter was not updated; its first step may have made its state, in which nothing is yet."""
    if len(before) > 1:
        return are_equal(contents, before)
    param, step_and_moments, weights = contents[0], contents[1:4], contents[4:]  # in the order of STATE
    return (
        torch.equal(param, before[0])
        and not any(map(torch.count_nonzero, step_and_moments))
        and all(torch.equal(weight.to(param.dtype), param) for weight in weights)
    )


def lost_by_step(trainee: Trainee, before: list[Contents], after: list[Contents], told: bool) -> str:
    """Repeat a step that was disturbed; say what is lost, or nothing."""
    if trainee.scaler and not told:
        # Torch's GradScaler multiplies by a scale that an exception before the step has left to the optimizer.
        for name in ("grad_scale", "found_inf"):
            trainee.optimizer.__dict__.pop(name, None)
    now = trainee.contents()
    is_updated = [are_equal(one, new) for one, new in zip(now, after, strict=True)]
    for i, (one, old) in enumerate(zip(now, before, strict=True)):
        if not is_updated[i] and not is_before(one, old):
            return f"parameter {i} is partially updated"
    if not told and any(is_updated):
        # The exception came after the step was complete, when nothing of this package ran.
        return "" if all(is_updated) else "some are updated and the exception does not say so"
    for i, param in enumerate(trainee.params):
        if param.numel() and is_updated[i] != (param.grad is None):
            return f"parameter {i} is {'' if is_updated[i] else 'not '}updated, but its grad says otherwise"
    if not all(param.grad is None for param in trainee.params):
        trainee.step()
    final = trainee.contents()
    wrong = [i for i, (one, new) in enumerate(zip(final, after, strict=True)) if not are_equal(one, new)]
    return f"after a second call parameters {wrong} differ" if wrong else ""


def lost_by_swap(trainee: Trainee, before: list[Contents]) -> str:
    """Look at weights and averages after a swap that was disturbed; say what is lost, or nothing."""
    gc.collect()
    if not all(map(are_equal, trainee.contents(), before)):
        return "weights or averages differ"
    try:
        trainee.optimizer.state_dict()
        with trainee.optimizer.swap_ema_params():
            for param, one in zip(trainee.params, before, strict=True):
                shown = one[4] if len(one) > 1 else one[0]  # STATE has the average fourth
                if not torch.equal(param.detach().cpu(), shown.to(param.dtype)):
                    return "a second swap does not show the averages"
    except RuntimeError as error:
        return f"the optimizer is locked: {error}"
    return "" if all(map(are_equal, trainee.contents(), before)) else "a second swap does not restore the weights"


def swap(trainee: Trainee) -> None:
    with trainee.optimizer.swap_ema_params():
        for param in trainee.params:
            param.detach()


@cache
def contents_after(device: str, name: str, steps: int) -> list[Contents]:
    """Return what belongs to each parameter after a step that nothing disturbs."""
    trainee = Trainee(device, steps, **CONFIGURATIONS[name])
    trainee.step()
    return trainee.contents()


class Attempt:
    """A step or a swap that something is going to disturb.

    Args:
        device: ``"cpu"`` or ``"npu"``.
        name: one of ``CONFIGURATIONS``.
        action: ``"step"`` or ``"swap"``.
        steps: how many were done before.
    """

    def __init__(self, device: str, name: str, action: str, steps: int) -> None:
        self._after = contents_after(device, name, steps)
        self._trainee = Trainee(device, steps, **CONFIGURATIONS[name])
        self._before = self._trainee.contents()
        self._is_step = action == "step"

    def act(self) -> None:
        if self._is_step:
            self._trainee.step()
        else:
            swap(self._trainee)

    def lost(self, error: BaseException | None) -> str:
        """Say what was lost by this exception, or nothing."""
        notes = "".join(getattr(error, "__notes__", ()))
        if error is not None and ("partially updated" in notes or "next call of step()" in str(error)):
            self._trainee.optimizer.state_dict()  # which finishes what the exception has said is left
        if not self._is_step:
            return lost_by_swap(self._trainee, self._before)
        if error is not None:
            return lost_by_step(
                self._trainee, self._before, self._after, told="the step updated these parameters" in notes
            )
        is_right = all(map(are_equal, self._trainee.contents(), self._after))
        return "" if is_right else "a step without an exception is wrong"


@dataclass
class Report:
    """Counts of trials, and what was lost in which of them."""

    trials: Counter[str] = field(default_factory=Counter)
    disturbed: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{kind}: {self.trials[kind]} trials, {self.disturbed[kind]} disturbed" for kind in self.trials]
        return "\n".join([*lines, f"{len(self.losses)} lost", *self.losses])


class Campaign:
    """Trials on a device.

    Args:
        device: ``"cpu"`` or ``"npu"``.
        report: where results go.
    """

    def __init__(self, device: str, report: Report) -> None:
        self.device, self.report = device, report

    def trial(self, kind: str, name: str, action: str, steps: int, disturb: Callable[[Action], None]) -> None:
        """Do an action that is disturbed."""
        attempt = Attempt(self.device, name, action, steps)
        error: BaseException | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                disturb(attempt.act)
            except (KeyboardInterrupt, RuntimeError) as caught:
                # A kept traceback keeps the frames, one of which has a swap that has not exited.
                error = caught.with_traceback(None)
            torch.set_grad_enabled(True)  # a signal inside torch.no_grad() itself leaves it off, whoever uses it
            self.report.trials[kind] += 1
            self.report.disturbed[kind] += error is not None
            lost = attempt.lost(error)
        if lost:
            self.report.losses.append(f"{kind}, {name}, {action} after {steps} steps: {lost}")

    def interrupt(self, trials: int, seed: int = 0) -> None:
        """Let a signal come at a random time."""
        chance = random.Random(seed)
        cases = list(itertools.product(CONFIGURATIONS, ("step", "swap"), (0, 2)))
        durations: dict[Any, float] = {}
        for i in range(trials):
            case = name, action, steps = cases[i % len(cases)]
            if case not in durations:
                attempt = Attempt(self.device, *case)
                start = time.perf_counter()
                attempt.act()
                durations[case] = time.perf_counter() - start
            delay = max(1e-6, chance.uniform(0, durations[case]))
            self.trial("signals", *case, partial(_with_timer, delay))

    def interrupt_everywhere(self, every: int = 1, file: str = "") -> None:
        """Raise ``KeyboardInterrupt`` at every place of the package, or of a file, where a signal handler may run."""
        for name, action, steps in itertools.product(CONFIGURATIONS, ("step", "swap"), (0, 2)):
            points = SignalPoints()
            points.run(Attempt(self.device, name, action, steps).act)
            for nth in points.first_and_last(file)[::every]:
                self.trial("signals at places", name, action, steps, SignalPoints(nth).run)

    def fail_operators(self, counts: tuple[int, ...] = (1, 2, 1000), every: int = 1) -> None:
        """Make the n-th torch operator, and all following ones, fail, for every n."""
        for (name, action, steps), count in itertools.product(
            itertools.product(CONFIGURATIONS, ("step", "swap"), (0, 2)), counts
        ):
            for nth in itertools.count(0, every):
                disturbance = FailOperators(nth, count)
                self.trial(f"{count} failing operator{'s' * (count > 1)}", name, action, steps, disturbance.run)
                if len(disturbance.seen) <= nth:
                    break


def _with_timer(delay: float, action: Action) -> None:
    signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        action()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class FailOperators(TorchDispatchMode):
    """Lets some operators of torch raise before they do anything.

    Args:
        first: how many are done before.
        count: how many fail.
        name: only operators with this in their name count.
    """

    def __init__(self, first: int, count: int, name: str = "") -> None:
        super().__init__()
        self.seen: list[str] = []
        self._failing, self._name = range(first, first + count), name

    def run(self, action: Action) -> None:
        with self:
            action()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace != "profiler" and self._name in str(function):
            self.seen.append(str(function))
            if len(self.seen) - 1 in self._failing:
                raise Failed(f"asked for by a trial: {function}")
        return function(*args, **(kwargs or {}))


@contextmanager
def timer_raises() -> Iterator[None]:
    """Let the timer raise what Ctrl-C does; where Python drops interrupts, as in ``__del__``, nothing is printed."""

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous, hook = signal.signal(signal.SIGALRM, raise_interrupt), sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, previous)


def run(device: str, trials: int, every: int, seed: int = 0) -> Report:
    """Run a campaign on a device."""
    torch.set_num_threads(1)  # tiny tensors wait for threads longer than they work
    report = Report()
    campaign = Campaign(device, report)
    with timer_raises():
        campaign.interrupt(trials, seed)
        if device == "cpu":
            campaign.interrupt_everywhere(every)
    campaign.fail_operators(counts=(1, 2, 1000) if device == "cpu" else (1,), every=every)
    return report


def main() -> None:
    """Run campaigns on the CPU, and on the host NPU with every kind of task queue; print their counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "npu"), help="only this one; npu needs a host NPU")
    parser.add_argument("--trials", type=int, default=1000, help="signals on each device")
    parser.add_argument("--every", type=int, default=1, help="of the calls that can fail, take every n-th")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the signals")
    parser.add_argument("--page", type=Path, help="a file that the counts are written to")
    arguments = parser.parse_args()
    device = arguments.device or "cpu"
    report = run(device, arguments.trials, arguments.every, arguments.seed)
    where = device if device == "cpu" else f"npu, TASK_QUEUE_ENABLE={os.environ.get('TASK_QUEUE_ENABLE', '1')}"
    print(f"{where}\n{report}", flush=True)
    if arguments.page:
        command = f"python -m tests.interrupts --trials {arguments.trials}"
        if arguments.every > 1:
            command += f" --every {arguments.every}"
        title = f"The optimizer interrupted: {where}"
        write_section(arguments.page, title, command, str(report).replace("\n", "\n\n"))
    status = bool(report.losses)
    if arguments.device is None and not status:
        status = _some_queue_loses(arguments)
    sys.exit(status)


def _some_queue_loses(arguments: argparse.Namespace) -> bool:
    """Run the campaign on host NPUs, one for every kind of task queue; return whether something was lost."""
    names = ("trials", "every", "seed", *(["page"] if arguments.page else []))
    options = [f"--{name}={getattr(arguments, name)}" for name in names]
    command = [sys.executable, "-m", "host_npu", "-m", "tests.interrupts", "--device=npu", *options]
    queues = [{**os.environ, "TASK_QUEUE_ENABLE": queue} for queue in ("0", "1", "2")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # of threads that wait for processes
        return any(each.returncode for each in pool.map(lambda queue: subprocess.run(command, env=queue), queues))


if __name__ == "__main__":
    main()
