"""Report what this installation supports and what is missing: ``python -m torch_aclnn_ops.doctor``.

With ``--check`` every operator and the optimizer are compared with the CPU: on an NPU, with
``python -m host_npu -m torch_aclnn_ops.doctor --check`` on a simulated one, or with ``--device cpu`` on the CPU.
"""

import argparse
import dataclasses
import inspect
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch_aclnn_ops import _cpu_extension, _extension, _torch_npu, functional, ops
from torch_aclnn_ops._checks import DROP_INS
from torch_aclnn_ops._installation import ON_THE_HOST_NPU, Finding, findings, has_npu_or_cann, is_simulated
from torch_aclnn_ops._switch import HOW_TO_ENABLE, is_disabled
from torch_aclnn_ops._version import __version__
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Finding", "Outcome", "check", "describe", "findings", "main"]


def __dir__() -> list[str]:
    return __all__


_WIDEST = 100  # columns; longer lines are hard to read
_CLASSES = 160
# Relative to the largest element. A float32 result is a sum of a few hundred terms. A 16-bit result is rounded three
# times: the gradient of the logits, its matrix product, and the multiplication by grad_output.
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3 * 2**-11, torch.bfloat16: 3 * 2**-8}
_STEPS = 200
_LR, _WEIGHT_DECAY, _EMA_DECAY = 0.01, 0.1, 0.9
# Relative to the largest element: CANN computes 1 - beta ** step in float32, which cancels in the first steps.
_STEP_TOLERANCE = 1e-4
# The rounding error of a parameter.
_ROUNDINGS = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}


class Outcome(NamedTuple):
    """The outcome of a check.

    Attributes:
        group: ``"operator"`` or ``"optimizer"``.
        name: What was checked.
        is_right: Whether the result is correct.
        detail: The error relative to the largest element, or what is wrong.
    """

    group: str
    name: str
    is_right: bool
    detail: str


def check(device: str = "npu") -> Iterator[Outcome]:
    """Compare every operator and 200 steps of the optimizer with float64 on the CPU.

    Args:
        device: ``"npu"`` or ``"cpu"``.

    Returns:
        An iterator that runs one check at a time and yields its outcome.

    Example:
        >>> next(check("cpu"))._replace(detail="")
        Outcome(group='operator', name='binary_cross_entropy, torch.float64', is_right=True, detail='')
    """
    torch.manual_seed(0)
    for group, name, run in _checks(device):
        try:
            yield Outcome(group, name, True, run())
        except Exception as error:  # reported in the table; the other checks still run
            lines = str(error).strip().splitlines() or [""]
            yield Outcome(group, name, False, f"{type(error).__name__}: {lines[0]}")


def _checks(device: str) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Yield the group and name of each check, and a function that returns its error, or raises."""
    lacks_bfloat16 = device == "npu" and not torch.npu.is_bf16_supported()  # type: ignore[attr-defined]
    dtypes = [dtype for dtype in _TOLERANCES if not (lacks_bfloat16 and dtype == torch.bfloat16)]
    for name, call in _calls().items():
        for dtype in dtypes:
            # A head in float64 falls back to matrix products, for which CANN has no float64.
            if (device, name, dtype) != ("npu", "linear_cross_entropy", torch.float64):
                yield "operator", f"{name}, {dtype}", partial(_check_call, call, device, dtype)
    for dtype in (torch.float32, dtypes[-1]):
        yield "optimizer", f"{_STEPS} steps, {dtype}", partial(_check_steps, device, dtype)


class _Call(NamedTuple):
    """A call of a drop-in: the function, torch's function, differentiated inputs, and other arguments."""

    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: list[Tensor]
    constants: list[Tensor]


def _normal(*shape: int) -> Tensor:
    """Return a float64 tensor of a standard normal distribution."""
    return torch.randn(shape, dtype=torch.float64)


def _calls() -> dict[str, _Call]:
    """Return a call of each drop-in by name."""
    made = {
        "embedding": _Call(
            lambda weight, indices: functional.embedding(indices, weight),
            lambda weight, indices: F.embedding(indices, weight),
            [_normal(50, 12)],
            [torch.randint(50, (9, 4))],
        ),
        "linear_cross_entropy": _Call(
            functional.linear_cross_entropy,
            lambda input, weight, target: F.cross_entropy(F.linear(input, weight), target),
            # Logits of about 1, so that kernels with 16-bit logits stay accurate.
            [_normal(40, 24), _normal(_CLASSES, 24) / math.sqrt(24)],
            [torch.randint(_CLASSES, (40,))],
        ),
    }
    # Functions of an input, and losses of an input and a target of the same shape. All of them accept probabilities.
    for name in DROP_INS:
        parameters = inspect.signature(getattr(functional, name)).parameters.values()
        needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        if needed in (["input"], ["input", "target"]):
            first, *others = (_normal(7, 33).sigmoid() for _ in needed)
            made[name] = _Call(getattr(functional, name), getattr(F, name), [first], others)
    return {name: made[name] for name in DROP_INS}


def _check_call(call: _Call, device: str, dtype: torch.dtype) -> str:
    constants = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in call.constants]
    inputs = [tensor.detach().to(device, dtype).requires_grad_() for tensor in call.inputs]
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    result = call.function(*inputs, *(tensor.to(device) for tensor in constants))
    truth = call.reference(*exact, *(tensor.double() if tensor.is_floating_point() else tensor for tensor in constants))
    grad = _normal(*truth.shape).to(dtype)
    gradients = torch.autograd.grad(result, inputs, grad.to(device, result.dtype))
    truths = torch.autograd.grad(truth, exact, grad.double())
    errors = [_error_of(result, truth.detach(), _TOLERANCES[dtype], "the result")]
    errors += [_error_of(*pair, _TOLERANCES[dtype], "a gradient") for pair in zip(gradients, truths, strict=True)]
    return f"error {max(errors):.1e}"


def _check_steps(device: str, dtype: torch.dtype) -> str:
    """Compare weights and EMA weights after steps with the same gradients; 16-bit weights have master weights."""
    param = torch.nn.Parameter(torch.randn(33, 7).to(dtype).to(device))
    truth = torch.nn.Parameter(param.detach().cpu().double())
    average = truth.detach().clone()
    optimizer = FusedEmaAdam([param], _LR, weight_decay=_WEIGHT_DECAY, ema_decay=_EMA_DECAY)
    reference = torch.optim.AdamW([truth], _LR, weight_decay=_WEIGHT_DECAY)
    for _ in range(_STEPS):
        gradient = torch.randn(33, 7).to(dtype)
        param.grad, truth.grad = gradient.to(device), gradient.double()
        optimizer.step()
        reference.step()
        average.lerp_(truth.detach(), 1 - _EMA_DECAY)
    tolerance = _STEP_TOLERANCE + _ROUNDINGS[dtype]
    errors = [_error_of(param, truth.detach(), tolerance, "a weight")]
    with optimizer.swap_ema_params():
        errors.append(_error_of(param, average, tolerance, "an EMA weight"))
    return f"error {max(errors):.1e}"


def _error_of(found: Tensor, truth: Tensor, tolerance: float, what: str) -> float:
    """Return the error relative to the largest element; raise if it exceeds the tolerance."""
    error: float = (found.detach().cpu().double() - truth).abs().max().item() / max(1e-3, truth.abs().max().item())
    if not error <= tolerance:
        raise ArithmeticError(f"the error of {what} is {error:.1e}, which exceeds the tolerance of {tolerance:.1e}")
    return error


def describe() -> str:
    """Describe what can be used, the findings and their remedies, and which implementation each operator uses.

    Returns:
        A report of several lines that fit the terminal.

    Example:
        >>> describe().splitlines()[0]  # doctest: +ELLIPSIS
        'CPU: ready, ...'
    """
    return _described(findings())


def _described(rows: Sequence[Finding]) -> str:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    found = ((row.what, (row.found, f"Remedy: {row.remedy}" if row.remedy else "")) for row in rows)
    devices = ("CPU", "NPU") if _torch_npu.is_imported() else ("CPU",)
    used = ((name, [f"{device}: {by[device.lower()]}" for device in devices]) for name, by in operator_paths().items())
    return "\n\n".join(("\n".join(_verdict(rows)), _titled(found, width), _titled(used, width)))


def _verdict(rows: Sequence[Finding]) -> Iterator[str]:
    """Yield what can be used: whether the package is disabled, a line for the CPU, and one for the NPU."""
    if is_disabled():
        yield HOW_TO_ENABLE
    yield f"CPU: ready, {'with' if _cpu_extension.why_unavailable() is None else 'without'} compiled CPU kernels"
    if broken := [row.what for row in rows if row.is_broken]:
        yield f"NPU: not ready, see the remedy of {' and '.join(broken)}"
    elif _torch_npu.is_imported():
        yield "NPU: ready, simulated" if is_simulated() else "NPU: ready"
    else:
        yield f"NPU: not ready: {_torch_npu.why_unavailable()}" if has_npu_or_cann() else "NPU: none"


def _titled(sections: Iterable[tuple[str, Sequence[str]]], width: int) -> str:
    """Return each title with its paragraphs below it, in lines of a width; longer words, such as paths, are kept."""
    wrapper = textwrap.TextWrapper(
        width, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join("\n".join([title, *map(wrapper.fill, filter(None, texts))]) for title, texts in sections)


def operator_paths() -> dict[str, dict[str, str]]:
    """Return which implementation each raw operator uses per device type."""
    paths = {}
    for operator in (getattr(ops, name) for name in ops.__all__):
        reason = _extension.why_unavailable() or operator.why_not_this_chip()
        paths[operator.name] = {
            "cpu": "native PyTorch kernel" if operator.has_cpu_kernel else "PyTorch fallback",
            "npu": operator.cann if reason is None else f"PyTorch fallback: {reason}",
        }
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, or check the operators and print a table; as text or JSON.

    Args:
        arguments: Command-line arguments; ``sys.argv[1:]`` if ``None``.

    Returns:
        The exit status: 1 if a component is installed but cannot be used as it is, else 0. With ``--check``: 1 if a
        check fails, 2 if there is no NPU to check, else 0.

    Example:
        >>> main(["--json"])  # doctest: +ELLIPSIS
        {
          "findings": [...
        0
        >>> main(["--check", "--device", "cpu"])  # doctest: +ELLIPSIS
        operator   binary_cross_entropy, torch.float64                         right     error ...
        0
    """
    options = _parser().parse_args(arguments)
    if options.check:
        return _check(options.device, options.json)
    rows = findings()
    print(json.dumps(_report(rows), indent=2) if options.json else _described(rows))
    return int(any(row.is_broken for row in rows))


def _report(rows: Sequence[Finding]) -> dict[str, Any]:
    return {"findings": [dataclasses.asdict(row) for row in rows], "operators": operator_paths()}


def _check(device: str, as_json: bool) -> int:
    reason = _extension.why_unavailable() if device == "npu" else None
    if reason is not None:
        print(
            f"There is no NPU: {reason}. On a machine without one, run `{ON_THE_HOST_NPU} --check` to use the host NPU,"
            " which simulates one on the CPU, or pass --device cpu.",
            file=sys.stderr,
        )
        return 2
    if is_disabled():
        print(HOW_TO_ENABLE, file=sys.stderr)
    outcomes = []
    for outcome in check(device):
        outcomes.append(outcome)
        if not as_json:
            result = "right" if outcome.is_right else "WRONG"
            print(f"{outcome.group:<10} {outcome.name:<59} {result:<9} {outcome.detail}", flush=True)
    wrong = sum(not outcome.is_right for outcome in outcomes)
    if as_json:
        report = {"device": device, "checks": [outcome._asdict() for outcome in outcomes], **_report(findings())}
        print(json.dumps(report, indent=2))
    else:
        print(f"{wrong} of {len(outcomes)} checks are wrong.")
    return int(wrong > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_aclnn_ops.doctor",
        description=f"{__doc__.partition(':')[0]}. For programs that run on the host NPU: {ON_THE_HOST_NPU}.",
        epilog="The exit status is 1 if an installed component cannot be used as it is, or a check fails; 2 if there is"
        " no NPU to check; and 0 otherwise.",
    )
    parser.add_argument("--version", action="version", version=f"torch_aclnn_ops {__version__}")
    parser.add_argument("--json", action="store_true", help="print JSON, for bug reports")
    parser.add_argument("--check", action="store_true", help="compare every operator and the optimizer with the CPU")
    parser.add_argument("--device", choices=("npu", "cpu"), default="npu", help="what to check (default: npu)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
