"""The plots of the benchmarks: time and memory against size, for this package and its peers."""

import io
from collections.abc import Iterable
from pathlib import Path

from torch_aclnn_ops.optim.sharded import replacing

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
from PIL import Image

from benchmarks._report import Rows, is_limit

WIDTH = 4.0  # inches, of 150 pixels: readable on a phone, too
_FONT = 9
_MARKERS = "osD^v<>P*X"
_COLORS = ("tab:blue", "tab:green", "tab:purple", "tab:orange", "tab:brown", "tab:cyan", "tab:olive", "tab:pink")
_LEAST_SPAN = 4
_OF_COLUMN = {"minimum_s": ("time, ms", 1e3), "peak_bytes": ("peak memory, MB", 1e-6)}


def new_figure(height: float) -> Figure:
    """Make a figure as wide as a phone's screen."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG of few bytes."""
    for axes in figure.axes:
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
            text.set_fontsize(_FONT)
        axes.grid(alpha=0.3)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    write_small(Image.open(drawn), path)


def write_small(picture: Image.Image, path: Path) -> None:
    """Write a PNG with a palette, which takes a third of the bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(file, format="png", optimize=True)


def styles(names: Iterable[str]) -> dict[str, dict[str, object]]:
    """Choose a color and a marker for each case: ours red, the limit a black line without markers."""
    chosen: dict[str, dict[str, object]] = {}
    others = iter(zip(_COLORS, _MARKERS[1:], strict=False))
    for name in dict.fromkeys(names):
        if is_limit(name):
            chosen[name] = {"color": "black", "linestyle": "--", "linewidth": 1}
        elif name in ("torch_aclnn_ops", "FusedEmaAdam"):
            chosen[name] = {"color": "tab:red", "marker": "o", "linewidth": 2, "zorder": 3}
        else:
            color, marker = next(others)
            chosen[name] = {"color": color, "marker": marker, "linewidth": 1.2}
        chosen[name]["markersize"] = 4
    return chosen


def draw(axes: Axes, group: Rows, column: str, how: dict[str, dict[str, object]]) -> None:
    """Draw a column against the size, both logarithmic."""
    label, factor = _OF_COLUMN[column]
    for by in dict.fromkeys(row["by"] for row in group):
        points = [(int(row["size"]), float(row[column]) * factor) for row in group if row["by"] == by and row[column]]
        points = [(size, value) for size, value in points if value > 0]
        if points:
            axes.plot(*zip(*points, strict=True), label=by, **how[by])
    axes.set(xlabel=group[0]["variable"], ylabel=label)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < _LEAST_SPAN * low:  # else what hardly grows would look as if it grew
        axes.set_ylim(low / _LEAST_SPAN**0.5, high * _LEAST_SPAN**0.5)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=7))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    size_axis(axes, [int(row["size"]) for row in group])


def size_axis(axes: Axes, sizes: Iterable[int]) -> None:
    """Make the horizontal axis logarithmic, with every other size at it."""
    shown = sorted(set(sizes))[::-2]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [_short(size) for size in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _short(size: int) -> str:
    for unit, name in ((2**20, "Mi"), (2**10, "Ki")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size:,}"
