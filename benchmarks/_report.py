"""The tables of the README and of docs/performance.md, made of the CSV files of every machine."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks._harness import LIMIT, OURS
from benchmarks._linear_cross_entropy_cases import LIGER, NAIVE, TORCHS
from benchmarks._results import MACHINE, RESULTS, ROOT, as_text, digits, format_table, read

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
HEAD, OPERATORS, CALLS, FILES = "a head's loss", "operators", "small calls", "files"
# The rows of the README's table, and what they are called there.
_WAYS = {
    NAIVE: "torch: `cross_entropy(linear(...))`",
    TORCHS: "torch: `linear_cross_entropy` in chunks",
    LIGER: "Liger's formula, in calls of torch",
    OURS: "here: `linear_cross_entropy`",
}
_SERIES = ("operator", "configuration", "device", "dtype", "variable")
# What this package calls its cases.
_OURS = (OURS, "FusedEmaAdam", "FusedEmaAdam(flatten=True)")

Rows = Sequence[dict[str, str]]
Cells = dict[str, str]


def sections(results: Path = RESULTS) -> list[tuple[Path, str, str]]:
    """Return what is generated: a page, the title of a section, and its text."""
    machines = {folder: _files(folder) for folder in sorted(path for path in results.iterdir() if path.is_dir())}
    heads = [files["linear_cross_entropy"] for files in machines.values() if "linear_cross_entropy" in files]
    first, *others = (
        f"{format_table(_ways(rows))}\n\n{described(rows)}."
        for rows in sorted(heads, key=lambda rows: rows[0]["date"], reverse=True)
    )
    return [
        (README, HEAD, first),
        (PAGE, HEAD, "\n\n".join([first, *others])),
        (PAGE, OPERATORS, _by_machine(machines, _against_torch)),
        (PAGE, CALLS, _by_machine(machines, _small_calls)),
        (PAGE, FILES, "\n".join(_links(folder, files) for folder, files in machines.items())),
    ]


def _files(folder: Path) -> dict[str, Rows]:
    return {path.stem: read(path) for path in sorted(folder.glob("*.csv"))}


def described(rows: Rows) -> str:
    """Say what a file was measured with."""
    row = rows[0]
    versions = ", ".join(f"{name} {row[name]}" for name in ("torch", "torch_aclnn_ops"))
    units = row["instruction_set"].partition(" (")[0]
    return f"{row['machine']} ({units}), {row['threads']} of {row['cores']} cores, {versions}, {row['date'][:10]}"


def _ways(rows: Rows) -> list[Cells]:
    """Make a row of each way to compute a head's loss: memory, time and error in the dtypes that were measured."""
    usual = [row for row in _measured(rows) if not row["variable"]]
    found = {(row["by"], row["dtype"]): row for row in usual}
    made = []
    for by, name in _WAYS.items():
        cells = {usual[0]["configuration"]: name}
        for row in (found[by, dtype] for dtype in ("float32", "bfloat16") if (by, dtype) in found):
            cells[f"{row['dtype']}: peak MB"] = f"{int(row['peak_bytes']) / 1e6:.0f}"
            cells[f"{row['dtype']}: time"] = f"{float(row['ratio_of_medians']):.2f}"
            cells[f"{row['dtype']}: error of the loss"] = f"{float(row['loss_error']):.0e}"
        made += [cells] if len(cells) > 1 else []
    return made


def _by_machine(machines: dict[Path, dict[str, Rows]], cells_of: Callable[[Rows], Iterable[tuple[Cells, str]]]) -> str:
    """Make a table with a column of each machine; ``cells_of`` makes the other cells of a row, and this one."""
    made: dict[tuple[str, ...], Cells] = {}
    for folder, files in machines.items():
        for others, cell in (pair for rows in files.values() for pair in cells_of(rows)):
            made.setdefault(tuple(others.values()), others)[folder.name] = cell
    columns = dict.fromkeys(name for cells in made.values() for name in cells)
    return format_table([{name: cells.get(name, "") for name in columns} for cells in made.values()])


def _against_torch(rows: Rows) -> Iterable[tuple[Cells, str]]:
    """Compare the largest case of each series of this package with the first case, which is torch's own."""
    measured = [row for row in _measured(rows) if row["peak_bytes"]]
    # A benchmark that has a case of a usual size is summed up by it, and not by the ends of its sweeps.
    for _, group in _series([row for row in measured if not row["variable"]] or measured):
        largest = max(int(row["size"] or 0) for row in group)
        theirs, *others = (row for row in group if int(row["size"] or 0) == largest)
        for row in (row for row in others if row["by"] in _OURS):
            [of] = {cells["of"] for cells in as_text([{key: row[key] for key in row if key not in MACHINE}])}
            name = row["operator"] if row["by"] == OURS else row["by"]
            memory = " of ".join(f"{int(one['peak_bytes']) / 1e6:,.0f}" for one in (row, theirs))
            yield {"": f"{name}, {of}", "compared to": theirs["by"]}, f"{float(row['ratio_of_medians']):.2f}; {memory}"


def _small_calls(rows: Rows) -> Iterable[tuple[Cells, str]]:
    """Compare calls of the smallest size, where memory was not measured."""
    swept = [row for row in _measured(rows) if row["variable"] and not row["peak_bytes"]]
    smallest = min((int(row["size"]) for row in swept), default=0)
    for row in swept:
        # The modules of nn cost what their functions do.
        if row["by"] == OURS and int(row["size"]) == smallest and not re.fullmatch(r"[A-Z]\w*", row["operator"]):
            micro = digits(float(row["minimum_s"]) * 1e6)
            on = "CPU" if row["device"] == "cpu" else "host NPU"
            yield {"call": row["operator"], "on": on}, f"{float(row['ratio_of_minima']):.2f}; {micro}"


def _links(folder: Path, files: dict[str, Rows]) -> str:
    links = ", ".join(f"[{name}](../benchmarks/results/{folder.name}/{name}.csv)" for name in files)
    return f"- {described(next(iter(files.values())))}: {links}."


def _measured(rows: Rows) -> Rows:
    return [row for row in rows if not row["status"].startswith("absent")]


def _series(rows: Iterable[dict[str, str]]) -> list[tuple[tuple[str, ...], Rows]]:
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in _SERIES), []).append(row)
    return list(found.items())


def sweeps(rows: Rows) -> list[tuple[tuple[str, ...], Rows]]:
    """Return the rows that differ in their size only, by what they have in common."""
    return [(key, group) for key, group in _series(rows) if key[-1] and len({row["size"] for row in group}) > 1]


def is_limit(by: str) -> bool:
    """Return whether a row is what no implementation can be expected to beat."""
    return by.startswith(LIMIT)
