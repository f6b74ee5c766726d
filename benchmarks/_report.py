"""The tables of docs/performance.md, made of the CSV files of every machine."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks._harness import LIMIT, OURS
from benchmarks._results import MACHINE, as_text, digits, format_table, read

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
GROWTH = "growth"
SUMMARY = "summary"
_SERIES = ("operator", "configuration", "device", "dtype", "variable")
_LEAST_BYTES = 2**18  # of a peak that is counted in pages, and so says something
_FEWEST_SIZES = 3
# What this package calls its cases.
_OURS = (OURS, "FusedEmaAdam", "FusedEmaAdam(flatten=True)")

Rows = Sequence[dict[str, str]]


def texts(results: Path) -> dict[str, str]:
    """Return the generated sections of the page by title: a summary, the tables of each benchmark, and growth."""
    found: dict[str, list[str]] = {}
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        growth, summary = [], []
        for path in sorted(folder.glob("*.csv")):
            rows = read(path)
            found.setdefault(path.stem, []).append(f"{described(rows)}:\n\n{_table(rows)}{_absent(rows)}")
            if any(row["peak_bytes"] for row in rows):
                growth += growths(rows)
                summary += _summary(rows)
        if growth:
            found.setdefault(GROWTH, []).append(f"`{folder.name}`:\n\n{format_table(growth)}")
        if summary:
            found.setdefault(SUMMARY, []).append(f"`{folder.name}`:\n\n{format_table(summary)}")
    shown = {title: "\n\n".join(parts) for title, parts in found.items()}
    return {title: text if title == SUMMARY else _folded(text) for title, text in shown.items()}


def _folded(text: str) -> str:
    return f'<details markdown="1">\n<summary>All figures</summary>\n\n{text}\n\n</details>'


def _summary(rows: Rows) -> list[dict[str, str]]:
    """Make a row of each largest case of this package, relative to the first case, which is torch's own."""
    measured = [row for row in rows if not row["status"].startswith("absent")]
    # A benchmark that has a case of a usual size is summed up by it, and not by the ends of its sweeps.
    usual = [row for row in measured if not row["variable"]] or measured
    made = []
    for _, group in _series(usual):
        largest = max(int(row["size"] or 0) for row in group)
        theirs, *others = (row for row in group if int(row["size"] or 0) == largest)
        made += [_beside(theirs, row) for row in others if row["by"] in _OURS]
    return made


def _beside(theirs: dict[str, str], ours: dict[str, str]) -> dict[str, str]:
    megabytes = [f"{int(row['peak_bytes']) / 1e6:,.1f}" if row["peak_bytes"] else "" for row in (ours, theirs)]
    [of] = {row["of"] for row in as_text([{name: value for name, value in ours.items() if name not in MACHINE}])}
    return {
        "": f"{ours['operator']}, {of}" if ours["by"] == OURS else f"{ours['by']}, {of}",
        "compared to": theirs["by"],
        "ratio of median times": f"{float(ours['ratio_of_medians']):.2f}",
        "of minimum times": f"{float(ours['ratio_of_minima']):.2f}",
        "peak MB": megabytes[0],
        "peak MB of the other": megabytes[1],
    }


def described(rows: Rows) -> str:
    """Say what a file was measured with, and in how many rounds."""
    row, rounds = rows[0], {int(row["rounds"]) for row in rows if row["rounds"]}
    parts = [f"{row['machine']}, cores: {row['cores']}", row["instruction_set"], f"threads: {row['threads']}"]
    versions = [f"{name} {row[name]}" for name in MACHINE if name.startswith("torch") and row[name] != "not installed"]
    if rounds:
        versions.append(f"rounds: {min(rounds)} to {max(rounds)}")
    return "; ".join([*parts, *versions, row["date"], f"commit {row['commit']}"])


def _table(rows: Rows) -> str:
    measured = [row for row in rows if not row["status"].startswith("absent")]
    if measured[0]["variable"] and not measured[0]["peak_bytes"]:
        return format_table(_ratios(measured))
    largest = {series: max(int(row["size"] or 0) for row in group) for series, group in _series(measured)}
    shown = [row for row in measured if int(row["size"] or 0) == largest[_key(row)]]
    return format_table(as_text({name: value for name, value in row.items() if name not in MACHINE} for row in shown))


def _ratios(rows: Rows) -> list[dict[str, str]]:
    """Make a row of each call, with its microseconds, and its ratio to torch's of each size."""
    sizes = sorted({int(row["size"]) for row in rows})
    made = []
    for call, group in groupby(sorted(rows, key=lambda row: row["operator"]), key=lambda row: row["operator"]):
        by_size = {int(row["size"]): row for row in group if row["by"] == "torch_aclnn_ops"}
        cells = {"call": call}
        for size in sizes:
            row = by_size.get(size)
            micro = f"{digits(float(row['minimum_s']) * 1e6)} us; " if row else ""
            cells[f"{size:,} elements"] = f"{micro}{float(row['ratio_of_minima']):.2f}" if row else ""
        made.append(cells)
    return made


def _absent(rows: Rows) -> str:
    reasons = [
        f"{row['by']} ({row['status'].partition(': ')[2]})" for row in rows if row["status"].startswith("absent")
    ]
    return f"\n\nAbsent: {'; '.join(reasons)}." if reasons else ""


def growths(rows: Rows) -> list[dict[str, str]]:
    """Return the exponents with which time and memory grow, of the first case and of this package's."""
    made = []
    for series, group in _series(row for row in rows if row["variable"]):
        operator, configuration, device, dtype, variable = series
        first = group[0]["by"]
        for by in dict.fromkeys(row["by"] for row in group):
            points = [row for row in group if row["by"] == by]
            is_ours = by in _OURS
            if not (by == first or is_ours) or len(points) < _FEWEST_SIZES:
                continue
            sizes = [int(row["size"]) for row in points]
            cells = {
                "operator": operator,
                "of": ", ".join(part for part in (configuration, dtype, "" if device == "cpu" else device) if part),
                "by": by,
                "sizes": f"{min(sizes):,} to {max(sizes):,} {variable}",
                "time grows with the power": _exponent(points, "minimum_s", 0),
                "memory": _exponent(points, "peak_bytes", _LEAST_BYTES),
            }
            made.append(cells)
    return made


def _exponent(points: Rows, column: str, least: float) -> str:
    """Fit a line to the logarithms by least squares, and return its slope."""
    found = [(math.log(float(row["size"])), float(row[column])) for row in points if row[column]]
    pairs = [(x, math.log(y)) for x, y in found if y > least]
    if len(pairs) < _FEWEST_SIZES:
        return ""
    mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return f"{sum((x - mean_x) * (y - mean_y) for x, y in pairs) / sum((x - mean_x) ** 2 for x, _ in pairs):.2f}"


def _key(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in _SERIES)


def _series(rows: Iterable[dict[str, str]]) -> list[tuple[tuple[str, ...], Rows]]:
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(_key(row), []).append(row)
    return list(found.items())


def sweeps(rows: Rows) -> list[tuple[tuple[str, ...], Rows]]:
    """Return the rows that differ in their size only, by what they have in common."""
    return [(key, group) for key, group in _series(rows) if key[-1] and len({row["size"] for row in group}) > 1]


def is_limit(by: str) -> bool:
    """Return whether a row is what no implementation can be expected to beat."""
    return by.startswith(LIMIT)
