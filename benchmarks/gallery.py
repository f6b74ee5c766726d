"""The pictures of the README and the guides: ``python -m benchmarks.gallery``.

Drawn from the output of ``examples/train_lm.py`` and from the last results of the benchmarks. ``make gallery`` trains
first; ``make bench`` draws those of the benchmarks.
"""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
from PIL import Image

from benchmarks._harness import LIMIT, OURS
from benchmarks._report import Rows
from benchmarks._results import RESULTS, ROOT, read

IMAGES, DEMO = ROOT / "docs" / "images", ROOT / "runs" / "gallery" / "loss.png"
# For each picture: the benchmark, the swept variable and the title; the measured column, its label and its unit.
SWEEPS = {
    "memory_vocabulary": ("linear_cross_entropy", "classes", "a loss of {}", "peak_bytes", "peak memory, MB", 1e-6),
    "step_tensors": ("ema_adam", "tensors", "a step, {}", "minimum_s", "time, ms", 1e3),
}
_SIZE = (4.0, 4.4)  # in inches, at 150 pixels: also readable on a phone
_STYLES = tuple(zip(("blue", "green", "purple", "orange", "brown", "cyan", "olive"), "sD^v<>P", strict=True))


def draw_sweep(name: str) -> bool:
    """Draw the sweep of a picture as it was last measured; return whether it has been measured."""
    benchmark, variable, title, column, label, unit = SWEEPS[name]
    newest: Rows = max((read(path) for path in RESULTS.glob(f"*/{benchmark}.csv")), key=_date, default=[])
    rows = [row for row in newest if row["variable"] == variable]
    if not rows:
        return False
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    styles = iter(_STYLES)
    for by in dict.fromkeys(row["by"] for row in rows):
        points = [(int(row["size"]), float(row[column]) * unit) for row in rows if row["by"] == by]
        shown = [point for point in points if point[1] > 0]
        if by.startswith(LIMIT):
            axes.plot(*zip(*shown, strict=True), "--", color="black", linewidth=1, label=by)
        elif by in (OURS, "FusedEmaAdam"):
            axes.plot(*zip(*shown, strict=True), "o-", color="tab:red", linewidth=2, markersize=4, zorder=3, label=by)
        else:
            color, marker = next(styles)
            style = {"color": f"tab:{color}", "marker": marker, "linewidth": 1.2, "markersize": 4}
            axes.plot(*zip(*shown, strict=True), label=by, **style)
    axes.set_title(title.format(f"{rows[0]['configuration']}, {rows[0]['dtype']}"), fontsize=9)
    axes.set_xlabel(variable, fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    _make_logarithmic(axes, sorted({int(row["size"]) for row in rows})[::-2])
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    write_small(Image.open(drawn), IMAGES / f"{name}.png")
    return True


def _date(rows: Rows) -> str:
    return rows[0]["date"]


def _make_logarithmic(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=7))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size // 1024} Ki" if size >= 1024 else str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=9)


def write_small(picture: Image.Image, path: Path) -> None:
    """Write a PNG with a palette, which is a third of the size."""
    picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, format="png", optimize=True)


def main() -> int:
    """Draw all pictures that have been measured; return 1 if one is missing."""
    drawn = {name: draw_sweep(name) for name in SWEEPS}
    if DEMO.exists():
        write_small(Image.open(DEMO), IMAGES / "demo_loss.png")
    for name, is_drawn in {**drawn, "demo_loss": DEMO.exists()}.items():
        print(f"{name}: {'drawn' if is_drawn else 'nothing to draw: run make bench, and make gallery'}")
    return 0 if all(drawn.values()) and DEMO.exists() else 1


if __name__ == "__main__":
    sys.exit(main())
