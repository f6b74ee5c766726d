"""Run the benchmarks, and write CSV files, plots, and the tables of the README and of docs/performance.md.

``python -m benchmarks`` runs all; ``python -m benchmarks losses embedding`` runs two, and keeps the others' files.
``--figures`` measures nothing: it makes plots and tables again. With ``--quick`` the files go to ``runs/benchmarks``.
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
from benchmarks._results import RESULTS, ROOT

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
    "patched_model": (),
    "trl": (),
}
_LONGEST = 1800  # seconds of a benchmark
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


def write_figures() -> None:
    """Draw the plots of the pages, and write their tables."""
    for page, title, text in _report.sections():
        write_between(page, title, text)
    if not is_installed("matplotlib"):
        print("no plots, because matplotlib is not installed: pip install '.[benchmark]'", file=sys.stderr)
        return
    from benchmarks import gallery

    for name in gallery.SWEEPS:
        gallery.draw_sweep(gallery.IMAGES / f"{name}.png", name)


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
    if output is None:
        write_figures()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
