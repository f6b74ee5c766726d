"""Run the benchmarks, and write CSV files, plots, and the tables of the README and of docs/performance.md.

``python -m benchmarks`` runs all; ``python -m benchmarks drop_ins ema_adam`` runs two, and keeps the other files.
``--figures`` only draws plots and tables again. With ``--quick``, the files go to ``runs/benchmarks``.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import _report
from benchmarks._figures import write_between
from benchmarks._results import RESULTS, ROOT

# The names of the benchmarks, and the commands that run them.
BENCHMARKS = {
    name: [f"benchmarks.{name}"]
    for name in "call_overhead drop_ins ema_adam integrations linear_cross_entropy linear_kl_div".split()
} | {"call_overhead_npu": ["benchmarks.call_overhead", "--device", "npu"]}


def measure(name: str, output: Path, quick: bool) -> bool:
    """Run a benchmark in a separate process; return whether it succeeded."""
    print(f"\n## {name}\n", flush=True)
    command = [sys.executable, "-m", *BENCHMARKS[name], "--output", str(output), *(["--quick"] * quick)]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def write_figures() -> None:
    """Draw the plots of the pages and write their tables."""
    for page, title, text in _report.sections():
        write_between(page, title, text)
    try:
        from benchmarks import gallery
    except ImportError as error:
        print(f"no plots: {error}; pip install '.[benchmark]'", file=sys.stderr)
        return
    for name in gallery.SWEEPS:
        gallery.draw_sweep(name)


def main() -> int:
    """Run as the command line requests; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    known = ", ".join(BENCHMARKS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {known} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds, to see that it runs")
    parser.add_argument("--figures", action="store_true", help="measure nothing, only draw and write tables again")
    options = parser.parse_args()
    if unknown := ", ".join(sorted(set(options.names) - BENCHMARKS.keys())):
        parser.error(f"NAME must be one of {known}, but it is {unknown}")
    names = () if options.figures else options.names or BENCHMARKS
    output = ROOT / "runs" / "benchmarks" if options.quick else RESULTS
    failed = [name for name in names if not measure(name, output, options.quick)]
    if not options.quick:
        write_figures()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
