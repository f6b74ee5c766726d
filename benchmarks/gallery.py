"""The pictures of the README and the guides: ``python -m benchmarks.gallery``.

Drawn from what a run of ``examples/train_lm.py`` has left and from the last results of the benchmarks. ``make gallery``
trains before; ``make bench`` draws those of the benchmarks.
"""

import argparse
import sys
from pathlib import Path

from PIL import Image

from benchmarks._plots import draw, new_figure, save, styles, write_small
from benchmarks._report import Rows, sweeps
from benchmarks._results import RESULTS, ROOT, read

IMAGES = ROOT / "docs" / "images"
# Of a picture: the benchmark, what grows, what is drawn, and the title.
SWEEPS = {
    "memory_vocabulary": ("linear_cross_entropy", "classes", "peak_bytes", "a loss of {}"),
    "step_tensors": ("ema_adam", "tensors", "minimum_s", "a step, {}"),
}


def newest(name: str) -> Rows | None:
    """Return the last rows of a benchmark, whatever the machine, or ``None``."""
    found = [read(path) for path in RESULTS.glob(f"*/{name}.csv")]
    return max(found, key=lambda rows: rows[0]["date"], default=None)


def draw_sweep(path: Path, name: str) -> bool:
    """Draw the sweep that a picture of this name shows; return whether there are results."""
    benchmark, variable, column, title = SWEEPS[name]
    groups = (group for key, group in sweeps(newest(benchmark) or []) if key[-1] == variable)
    if (group := next(groups, None)) is None:
        return False
    figure = new_figure(4.4)
    axes = figure.subplots()
    draw(axes, group, column, styles(row["by"] for row in group))
    axes.set_title(title.format(f"{group[0]['configuration']}, {group[0]['dtype']}"))
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    save(figure, path)
    return True


def copy_loss(path: Path, run: Path) -> bool:
    """Copy the loss curve of a training run; return whether there is one."""
    if not (run / "loss.png").exists():
        return False
    write_small(Image.open(run / "loss.png"), path)
    return True


def main() -> int:
    """Draw all pictures that there are figures for; return 1 if one is left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "gallery", help="output of examples/train_lm.py")
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder of the pictures")
    options = parser.parse_args()
    drawn = {"demo_loss": copy_loss(options.output / "demo_loss.png", options.run)}
    drawn |= {name: draw_sweep(options.output / f"{name}.png", name) for name in SWEEPS}
    for name, is_drawn in drawn.items():
        print(f"{name}: {'drawn' if is_drawn else 'nothing to draw: run make bench, and make gallery'}")
    return 0 if all(drawn.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
