"""The command-line interface of ``python -m torch_aclnn_ops.verify``."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_aclnn_ops import _extension, doctor
from torch_aclnn_ops._switch import how_to_enable, is_disabled
from torch_aclnn_ops._version import __version__
from torch_aclnn_ops.verify._outcomes import Outcome, verify

_RESULTS = {True: "right", False: "WRONG", None: "measured"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, print a table, and write a report if requested.

    Args:
        arguments: Command-line arguments; ``sys.argv[1:]`` if ``None``.

    Returns:
        The exit status: 0 if all checks pass, 1 if a check fails, 2 if there is no NPU.

    Example:
        >>> main(["--device", "cpu", "--quick"])  # doctest: +ELLIPSIS
        operator   binary_cross_entropy, torch.float64                         right     error ...
        0
    """
    options = _parser().parse_args(arguments)
    reason = _extension.why_unavailable() if options.device == "npu" else None
    if reason is not None:
        print(
            f"There is no NPU: {reason}. On a machine without one, run `python -m host_npu -m torch_aclnn_ops.verify`"
            " to use the host NPU, which simulates one on the CPU, or pass --device cpu.",
            file=sys.stderr,
        )
        return 2
    if is_disabled():
        print(f"{how_to_enable()}. The checks of the optimizer are those of its PyTorch fallback.", file=sys.stderr)
    outcomes = []
    for outcome in verify(options.device, options.quick):
        outcomes.append(outcome)
        print(f"{outcome.group:<10} {outcome.name:<59} {_RESULTS[outcome.is_right]:<9} {outcome.detail}", flush=True)
    wrong = [outcome for outcome in outcomes if outcome.is_right is False]
    print(f"{len(wrong)} of {sum(outcome.is_right is not None for outcome in outcomes)} checks are wrong.")
    if options.json is not None:
        options.json.write_text(_report(options.device, outcomes))
    return 1 if wrong else 0


def _report(device: str, outcomes: list[Outcome]) -> str:
    """Return the report as JSON, without user names and folders."""
    environment = [dataclasses.asdict(finding) for finding in doctor.findings()]
    checks = [outcome._asdict() for outcome in outcomes]
    return json.dumps({"device": device, "environment": environment, "checks": checks}, indent=2) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_aclnn_ops.verify",
        description="Compare every operator and the optimizer with the CPU, and measure their time and memory.",
    )
    parser.add_argument("--version", action="version", version=f"torch_aclnn_ops {__version__}")
    parser.add_argument("--device", choices=("npu", "cpu"), default="npu", help="where to run (default: npu)")
    parser.add_argument("--quick", action="store_true", help="skip measurements, and run fewer optimizer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and the environment to a file")
    return parser
