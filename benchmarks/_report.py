"""The tables of the README and of docs/performance.md, generated from the CSV files of all machines."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks._harness import OURS
from benchmarks._results import RESULTS, ROOT, digits, format_table, read
from benchmarks.linear_cross_entropy import LIGER, NAIVE, TORCHS

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
HEAD, OPERATORS, CALLS, FILES = "a head's loss", "operators", "small calls", "files"
# The rows of the README's table, and their labels.
_WAYS = {
    NAIVE: "torch: `cross_entropy(linear(...))`",
    TORCHS: "torch: `linear_cross_entropy` in chunks",
    LIGER: "Liger's formula, in calls of torch",
    OURS: "here: `linear_cross_entropy`",
}
# The names of this package's cases.
_OURS = (OURS, "FusedEmaAdam", "FusedEmaAdam(flatten=True)")

Rows = Sequence[dict[str, str]]
Cells = dict[str, str]


def sections(results: Path = RESULTS) -> list[tuple[Path, str, str]]:
    """Return the generated sections: page, title and text."""
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
    """Return a description of the machine and versions of a file."""
    row = rows[0]
    versions = ", ".join(f"{name} {row[name]}" for name in ("torch", "torch_aclnn_ops"))
    units = row["instruction_set"].partition(" (")[0]
    return f"{row['machine']} ({units}), {row['threads']} of {row['cores']} cores, {versions}, {row['date'][:10]}"


def _ways(rows: Rows) -> list[Cells]:
    """Return a row for each way to compute a head's loss: memory, time and error in the measured dtypes."""
    usual = [row for row in rows if not row["variable"]]
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
    """Return a table with a column for each machine; ``cells_of`` yields the other cells of a row, and this one."""
    made: dict[tuple[str, ...], Cells] = {}
    for folder, files in machines.items():
        for others, cell in (pair for rows in files.values() for pair in cells_of(rows)):
            made.setdefault(tuple(others.values()), others)[folder.name] = cell
    columns = dict.fromkeys(name for cells in made.values() for name in cells)
    return format_table([{name: cells.get(name, "") for name in columns} for cells in made.values()])


def _against_torch(rows: Rows) -> Iterable[tuple[Cells, str]]:
    """Compare each case of this package with the first case of the same calls, which is torch's."""
    first: dict[tuple[str, ...], dict[str, str]] = {}
    for row in (row for row in rows if row["peak_bytes"] and not row["variable"]):
        theirs = first.setdefault(tuple(row[name] for name in ("operator", "configuration", "dtype")), row)
        if row["by"] in _OURS:
            name = row["operator"] if row["by"] == OURS else row["by"]
            calls = {"": f"{name}, {row['configuration']}, {row['dtype']}", "compared to": theirs["by"]}
            memory = " of ".join(f"{int(one['peak_bytes']) / 1e6:,.0f}" for one in (row, theirs))
            yield calls, f"{float(row['ratio_of_medians']):.2f}; {memory}"


def _small_calls(rows: Rows) -> Iterable[tuple[Cells, str]]:
    """Compare small calls, for which memory is not measured."""
    for row in rows:
        if row["by"] == OURS and not row["peak_bytes"]:
            micro = digits(float(row["minimum_s"]) * 1e6)
            on = "CPU" if row["device"] == "cpu" else "host NPU"
            yield {"call": row["operator"], "on": on}, f"{float(row['ratio_of_minima']):.2f}; {micro}"


def _links(folder: Path, files: dict[str, Rows]) -> str:
    links = ", ".join(f"[{name}](../benchmarks/results/{folder.name}/{name}.csv)" for name in files)
    return f"- {described(next(iter(files.values())))}: {links}."
