"""Tables, CSV files and the plot of benchmarks/linear_cross_entropy.py."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from torch_aclnn_ops._files import replacing

from benchmarks._harness import format_table
from benchmarks._linear_cross_entropy_cases import LABELS, LIMIT, OURS

Row = Mapping[str, object]

GROUP = ("N", "D", "V", "dtype", "ignored", "pass")
FORWARD_AND_BACKWARD = "forward+backward"
NOTES = f"""\
Every row of these tables is a process of its own. "peak MB" is what a call needs beyond its arguments, the median of
three calls after the first. Errors are those against float64: of the loss absolute, of the gradients by rows (dx) and
by head (dw) the largest one divided by the largest gradient. "{LABELS[LIMIT]}" are what no loss can do
without: of the rows that are not ignored, into memory that was there before; its memory is the size of the gradients.
"""
INTERLEAVED_NOTES = f"""\
Here all cases take turns in one process, so that a change of the machine's speed meets all of them; ratios are those to
"{LABELS[LIMIT]}".
"""


def describe(group: Row) -> str:
    """Return the heading of a table."""
    ignored = f", {group['ignored']:.0%} of the rows ignored" if group["ignored"] else ""
    shape = "{N} x {D} x {V}".format(**group)
    return f"{shape}, {group['dtype']}, {group['pass']}{ignored}"


def table(rows: Sequence[Row]) -> str:
    """Format measurements of one group as a Markdown table."""
    lines = []
    for row in rows:
        line = {"by": LABELS[str(row["case"])]}
        if "peak_bytes" in row:
            line["peak MB"] = f"{row['peak_bytes'] / 1e6:.1f}"
        for name in ("median", "minimum"):
            seconds = row.get(f"{name}_s")
            line[f"{name} ms"] = str(row["status"]) if seconds is None else f"{seconds * 1e3:.1f}"
        for name in ("median", "minimum"):
            if f"{name}_ratio" in row:
                line[f"ratio of {'medians' if name == 'median' else 'minima'}"] = f"{row[f'{name}_ratio']:.2f}"
        for name in ("loss", "dx", "dw"):
            if f"{name}_error" in row:
                line[f"{name} error"] = f"{row[f'{name}_error']:.1e}"
        lines.append(line)
    names = max(lines, key=len)
    return format_table([{name: line.get(name, "") for name in names} for line in lines])


def write(path: Path, heading: str, rows: Sequence[Row]) -> None:
    """Write measurements as Markdown and as CSV, over those of an earlier run.

    Args:
        path: the files without their suffixes.
        heading: what is said above the tables.
        rows: measurements, those of a table one after the other.
    """
    tables = [f"### {describe(group[0])}\n\n{table(group)}\n" for group in _groups(rows)]
    with replacing(path.with_suffix(".md"), "t") as file:
        file.write("\n".join([heading, *tables]))
    with replacing(path.with_suffix(".csv"), "t", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw memory and time of forward and backward, a plot for each shape and dtype.

    Args:
        path: the PNG.
        rows: measurements; those with ignored rows are left out where there are others.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["pass"] == FORWARD_AND_BACKWARD and "minimum_s" in row]
    least_ignored = min((row["ignored"] for row in shown), default=0)
    groups = _groups(row for row in shown if row["ignored"] == least_ignored)
    dtypes = len({group[0]["dtype"] for group in groups})
    if not groups:
        return
    lines = -(-len(groups) // dtypes)
    figure = Figure(figsize=(8 * dtypes, 4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, group in zip(figure.subplots(lines, dtypes, squeeze=False).flat, groups, strict=False):
        axes.set(title=describe(group[0]), xlabel="peak memory, MB", ylabel="minimum time, ms")
        for row in group:
            color = {OURS: "tab:red", LIMIT: "black"}.get(row["case"], "tab:blue")
            axes.plot(
                row["peak_bytes"] / 1e6, row["minimum_s"] * 1e3, "x" if row["case"] == LIMIT else "o", color=color
            )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _label_points(axes, group)
    with replacing(path) as file:
        figure.savefig(file, dpi=110)


def _label_points(axes: object, group: Sequence[Row]) -> None:
    """Write the names beside the plot, ordered by time, so that they do not hide each other."""
    ordered = sorted(group, key=lambda row: row["minimum_s"])
    for place, row in enumerate(ordered):
        axes.annotate(
            LABELS[row["case"]],
            (row["peak_bytes"] / 1e6, row["minimum_s"] * 1e3),
            (1.04, (place + 0.5) / len(ordered)),
            textcoords="axes fraction",
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": "lightgray", "relpos": (0, 0.5)},
        )


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    return [list(group) for _, group in groupby(rows, key=lambda row: [row[name] for name in GROUP])]
