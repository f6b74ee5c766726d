"""Measurements as CSV files, in a folder per machine, and as Markdown tables."""

import csv
import datetime
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch_aclnn_ops import _cpu_extension

import torch

Row = Mapping[str, object]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# The columns of every file; additional columns come between the two groups.
MEASUREMENT = (
    "operator configuration device dtype variable size by rounds median_s minimum_s ratio_of_medians"
    " ratio_of_minima peak_bytes"
).split()
MACHINE = "machine instruction_set cores threads torch torch_npu torch_aclnn_ops date commit".split()

CORES = len(os.sched_getaffinity(0))  # before a benchmark restricts the threads
_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve", "sve2")


@cache
def machine() -> dict[str, str]:
    """Return a description of the CPU without the host's name, its instruction sets, versions, date and commit."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^(?:model name|Model|CPU part)\s*: (.*)$", info, re.MULTILINE)
    flags = set((re.search(r"^(?:flags|Features)\s*: (.*)$", info, re.MULTILINE) or [""] * 2)[1].split())
    kernels = "no csrc/cpu" if _cpu_extension.why_unavailable() else "csrc/cpu"
    units = " ".join(name for name in _UNITS if name in flags)
    return {
        "machine": model[1].strip() if model else platform.machine(),
        "instruction_set": f"{units} (torch {torch.backends.cpu.get_cpu_capability()}, {kernels})",
        "cores": str(CORES),
        "torch": torch.__version__,
        "torch_npu": _version("torch_npu"),
        "torch_aclnn_ops": _version("torch_aclnn_ops"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Earlier benchmarks of the same run have already written results.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results", ":!/docs")
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def has_bfloat16_instructions() -> bool:
    """Return whether the CPU has bfloat16 product instructions; without them, torch is tens of times slower."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(machine()["instruction_set"].partition(" (")[0].split())


def path_of(output: Path, name: str) -> Path:
    """Return the file of a benchmark on this machine, in a folder named by CPU, instructions and cores."""
    instructions = machine()["instruction_set"].partition(" (")[0].split()
    text = f"{machine()['machine']} {instructions[-1] if instructions else ''} {CORES} cores"
    return output / re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") / f"{name}.csv"


def write(path: Path, rows: Sequence[Row], threads: int) -> None:
    """Write a benchmark's rows, replacing the previous ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    extra = dict.fromkeys(column for row in rows for column in row if column not in MEASUREMENT)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*MEASUREMENT, *extra, *MACHINE])
        writer.writeheader()
        for row in rows:
            numbers = {key: f"{value:.6g}" for key, value in row.items() if isinstance(value, float)}
            writer.writerow({**row, **numbers, **machine(), "threads": threads})


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


_DESCRIBED = ("operator", "configuration", "device", "dtype", "variable", "size", "rounds", *MACHINE)


def as_text(rows: Iterable[Mapping[str, object]]) -> list[dict[str, str]]:
    """Return the cells of a table: milliseconds, ratios and megabytes, with as many digits as are meaningful."""
    made = []
    for row in rows:
        where = [str(row[name]) for name in ("configuration", "dtype") if row.get(name)]
        if row.get("variable"):
            where.insert(0, f"{int(str(row['size'])):,} {row['variable']}")
        if row.get("device") not in (None, "", "cpu"):
            where.append(f"on {row['device']}")
        cells = {"operator": f"{row['operator']}", "of": ", ".join(where)}
        for name, value in row.items():
            if name not in _DESCRIBED and value not in (None, ""):
                title, cell = _as_text(name, str(value))
                cells[title] = cell
        made.append(cells)
    names = dict.fromkeys(name for cells in made for name in cells)
    return [{name: cells.get(name, "") for name in names} for cells in made]


def _as_text(name: str, value: str) -> tuple[str, str]:
    words = name.replace("_", " ")
    if name.endswith("_s"):
        return f"{words[:-2]} ms", digits(float(value) * 1e3)
    if name.startswith("ratio"):
        return words, f"{float(value):.2f}"
    if name == "peak_bytes":
        return "peak MB", f"{float(value) / 1e6:.1f}"
    return words, f"{float(value):.1e}" if name.endswith("_error") else value


def digits(number: float) -> str:
    """Format a number with three digits, or all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Format rows as a Markdown table."""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = (names, ["-" * widths[name] for name in names], *([row[name] for name in names] for row in rows))
    return "\n".join(
        "| " + " | ".join(cell.ljust(widths[name]) for name, cell in zip(names, cells, strict=True)) + " |"
        for cells in lines
    )
