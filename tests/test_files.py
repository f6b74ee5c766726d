"""Files that the package, the examples and the benchmarks write: all of them or nothing, with the user's umask."""

import os
import stat
import sys
from pathlib import Path

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from PIL import Image

from benchmarks import _figures, _plots, _results

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import atomic_save
import lm_report

RESULT = lm_report.Result([2.0, 1.0], {2: (1.0, 1.0)}, 3.0, 1, 2, 1.0, "text", None)


def _save_ema_model(path):
    model = torch.nn.Linear(2, 2)
    FusedEmaAdam(model.parameters()).save_ema_model(model, path)


WRITERS = {
    "averages.pt": _save_ema_model,
    "checkpoint.pt": lambda path: atomic_save.save_atomically({"step": 1}, path),
    "loss.csv": lambda path: lm_report.write_table(RESULT, path),
    "loss.png": lambda path: lm_report.write_plot(RESULT, path),
    "performance.md": lambda path: _figures.write_between(path, "title", "text"),
    "results.csv": lambda path: _results.write(path, [{"operator": "mse_loss", "median_s": 1.0}], threads=1),
    "plot.png": lambda path: _plots.write_small(Image.new("RGB", (2, 2)), path),
}


@pytest.fixture(params=WRITERS)
def writer(request, tmp_path):
    """What writes a file, and the file, which has older contents."""
    path = tmp_path / request.param
    path.write_bytes(b"old")
    return WRITERS[request.param], path


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_a_file_has_the_permissions_that_the_umask_leaves(mask, writer):
    write, path = writer
    previous = os.umask(mask)
    try:
        write(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert path.read_bytes() != b"old"


def test_a_file_that_cannot_be_written_to_its_end_stays_as_it_was_and_leaves_nothing_beside_it(writer, monkeypatch):
    write, path = writer

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
