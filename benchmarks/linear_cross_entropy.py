"""linear_cross_entropy against its peers and against the matrix products alone: time, memory and errors.

``python -m benchmarks.linear_cross_entropy`` compares with the loss of the logits, with torch's own function in all its
ways to split the rows, and with Apple's cut-cross-entropy where it is installed: ``pip install ".[benchmark]"``, which
brings matplotlib for the plot too. Each case is measured in a process of its own; for the first shape all of them are
also timed in turn in one process. On two idle cores that takes hours; ``--quick`` measures the first shape only, which
takes about 20 minutes, and ``--quick --ignored 0`` half of that.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path

from benchmarks._linear_cross_entropy_cases import LABELS, LIMIT, is_installed
from benchmarks._linear_cross_entropy_report import (
    FORWARD_AND_BACKWARD,
    INTERLEAVED_NOTES,
    NOTES,
    Row,
    describe,
    plot,
    table,
    write,
)

SHAPES = ("2048x512x32000", "4096x1024x50257", "1024x2048x128256")


def measure(options: argparse.Namespace, group: Row, truths: str) -> list[Row]:
    """Measure each case in a process of its own."""
    rows = []
    for case in options.peers:
        row = {**group, "case": case, "status": "not installed"}
        if is_installed(case):
            print(f"{describe(group)}: {LABELS[case]}", file=sys.stderr)
            row.update(_in_new_process(group, case=case, rounds=options.rounds, truths=truths))
        rows.append(row)
    return rows


def measure_interleaved(options: argparse.Namespace, group: Row) -> list[Row]:
    """Measure all cases in turn in one process."""
    print(f"{describe(group)}: in turn", file=sys.stderr)
    cases = list(dict.fromkeys([*options.peers, LIMIT]))
    found = _in_new_process(group, cases=cases, rounds=options.rounds)
    rows = []
    for case in cases:
        row = {**group, "case": case, "status": found["status"] if is_installed(case) else "not installed"}
        if case in found:
            for name, seconds, limit in zip(("median", "minimum"), found[case], found[LIMIT], strict=True):
                row |= {f"{name}_s": seconds, f"{name}_ratio": seconds / limit}
        rows.append(row)
    return rows


def _in_new_process(group: Row, **arguments: object) -> dict[str, object]:
    problem = {"shape": [group[name] for name in "NDV"], "dtype": group["dtype"], "ignored": group["ignored"]}
    request = {"problem": problem, "backward": group["pass"] == FORWARD_AND_BACKWARD, **arguments}
    command = [sys.executable, "-m", "benchmarks._linear_cross_entropy_measure", json.dumps(request)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    sys.stderr.write(process.stderr)  # torch warns where it does not split the rows
    if process.returncode:
        reason = process.stderr.strip().splitlines()
        return {"status": f"failed ({process.returncode}): {reason[-1] if reason else ''}"}
    return {"status": "measured", **json.loads(process.stdout.splitlines()[-1])}


def main(options: argparse.Namespace) -> None:
    """Measure and print table by table; the files grow with it."""
    options.output.mkdir(parents=True, exist_ok=True)
    heading = f"linear_cross_entropy with torch {version('torch')}, 2 threads"
    rows: list[Row] = []
    interleaved: list[Row] = []

    def report(found: list[Row], measured: list[Row], name: str, notes: str) -> None:
        measured += found
        print(f"\n{describe(found[0])} ({name})\n\n{table(found)}", flush=True)
        write(options.output / name, f"{heading}\n\n{notes}", measured)

    for shape in options.shapes:
        if not options.interleaved:
            for dtype, ignored in product(options.dtypes, options.ignored):
                with tempfile.TemporaryDirectory() as truths:  # of one problem, because it holds gigabytes
                    for group in _groups(options, shape, dtype, ignored):
                        report(measure(options, group, truths), rows, "results", NOTES)
        if options.interleaved or shape == options.shapes[0]:
            for dtype in options.dtypes:
                for group in _groups(options, shape, dtype, options.ignored[0]):
                    report(measure_interleaved(options, group), interleaved, "interleaved", INTERLEAVED_NOTES)
    try:
        plot(options.output / "memory_and_time.png", rows)
    except ImportError as error:
        print(f"\nno plot: {error}")
    print(f"\nwritten to {options.output}")


def _groups(options: argparse.Namespace, shape: Sequence[int], dtype: str, ignored: float) -> list[Row]:
    sizes = dict(zip("NDV", shape, strict=True))
    return [{**sizes, "dtype": dtype, "ignored": ignored, "pass": name} for name in options.passes]


def _shape(text: str) -> tuple[int, ...]:
    shape = tuple(map(int, text.split("x")))
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(text)
    return shape


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", type=_shape, default=[*map(_shape, SHAPES)], help="rows x features x classes"
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    passes = ["forward", FORWARD_AND_BACKWARD]
    parser.add_argument("--passes", nargs="+", default=passes, choices=passes)
    parser.add_argument(
        "--ignored", nargs="+", type=float, default=[0.0, 0.2], help="shares of ignored rows; in turn only the first"
    )
    parser.add_argument("--peers", nargs="+", default=list(LABELS), choices=list(LABELS), help="cases")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each case")
    parser.add_argument("--quick", action="store_true", help="the first shape only")
    parser.add_argument("--interleaved", action="store_true", help="only time all cases in turn, at every shape")
    parser.add_argument("--output", type=Path, default=Path("runs/linear_cross_entropy"), help="folder of the files")
    options = parser.parse_args(arguments)
    if options.quick:
        del options.shapes[1:]
    return options


if __name__ == "__main__":
    main(parse())
