"""Run the benchmarks, and write CSV files, plots and the tables of docs/performance.md: ``python -m benchmarks``.

``python -m benchmarks losses embedding`` runs some of them, and keeps the files of the others. ``--figures`` measures
nothing: it makes plots and tables again. With ``--quick`` the files go to ``runs/benchmarks``.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import _report
from benchmarks._figures import write_between
from benchmarks._harness import is_installed
from benchmarks._results import RESULTS, ROOT, folder_of, machine, read

# What a benchmark is called, and the options that make it.
BENCHMARKS = {
    "call_overhead": (),
    "call_overhead_npu": ("--device", "npu"),
    "dispatch": (),
    "ema_adam": (),
    "embedding": (),
    "losses": (),
    "linear_cross_entropy": (),
    "linear_kl_div": (),
    "trl": (),
}
IMAGES = ROOT / "docs" / "images"
_LONGEST = 900  # seconds of a benchmark
_MODULES = {"call_overhead_npu": "call_overhead"}


def measure(name: str, output: Path, quick: bool) -> str | None:
    """Run a benchmark in a separate process; return the error, or ``None``."""
    module = f"benchmarks.{_MODULES.get(name, name)}"
    command = [sys.executable, "-m", module, *BENCHMARKS[name], "--output", str(output), *(["--quick"] * quick)]
    print(f"\n## {name}\n", flush=True)
    started = time.monotonic()
    try:
        status = subprocess.run(command, cwd=ROOT, timeout=_LONGEST).returncode
    except subprocess.TimeoutExpired:
        return f"{name}: not done after {_LONGEST} seconds"
    print(f"{time.monotonic() - started:.0f} seconds", flush=True)
    return f"{name}: ended with status {status}" if status else None


def write_figures(results: Path, images: Path, page: Path | None) -> None:
    """Draw this machine's plots, and write the tables of every machine into the page."""
    for title, text in _report.texts(results).items() if page else ():
        write_between(page, title, text)
    if not is_installed("matplotlib"):
        print("no plots, because matplotlib is not installed: pip install '.[benchmark]'", file=sys.stderr)
        return
    from benchmarks._plots import plot_sweeps

    for path in sorted((results / folder_of(machine())).glob("*.csv")):
        plot_sweeps(read(path), images / f"bench_{path.stem}.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds, to see that it runs")
    parser.add_argument("--figures", action="store_true", help="measure nothing, only draw and write tables again")
    parser.add_argument("--output", type=Path, help="folder of the files, without those of the documentation")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"NAME must be one of {', '.join(BENCHMARKS)}, but it is {', '.join(sorted(unknown))}")
    output = options.output or (ROOT / "runs" / "benchmarks" if options.quick else None)
    names = () if options.figures else options.names or BENCHMARKS
    results = output or RESULTS
    problems = [problem for name in names if (problem := measure(name, results, options.quick)) is not None]
    write_figures(results, output or IMAGES, None if output else _report.PAGE)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
