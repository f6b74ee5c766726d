"""Files that the package and the examples write: atomically, with the user's umask."""

import io
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import atomic_save


def _save_ema_model(path):
    model = torch.nn.Linear(2, 2)
    FusedEmaAdam(model.parameters()).save_ema_model(model, path)


WRITERS = {
    "averages.pt": _save_ema_model,
    "checkpoint.pt": lambda path: atomic_save.save_atomically({"step": 1}, path),
}


@pytest.fixture(params=WRITERS)
def writer(request, tmp_path):
    """A function that writes a file, and the file, which has older contents."""
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


def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(writer, monkeypatch):
    write, path = writer

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("writer", ["averages.pt"], indirect=True)
def test_the_target_of_a_symbolic_link_is_replaced(writer):
    write, path = writer
    link = path.parent / "links" / path.name
    link.parent.mkdir()
    link.symlink_to(path)
    write(link)
    assert link.is_symlink() and path.read_bytes() != b"old"
    assert sorted(path.parent.iterdir()) == sorted([path, link.parent]) and list(link.parent.iterdir()) == [link]


def test_a_fifo_is_written_to(tmp_path):
    os.mkfifo(path := tmp_path / "fifo")
    with ThreadPoolExecutor() as pool:
        contents = pool.submit(path.read_bytes)
        _save_ema_model(path)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert list(torch.load(io.BytesIO(contents.result()))) == ["weight", "bias"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_a_device_node_is_written_to(tmp_path):
    os.mknod(path := tmp_path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    _save_ema_model(path)
    assert stat.S_ISCHR(path.stat().st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_raises_oserror_with_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/missing/.averages.pt"):
        _save_ema_model(tmp_path / "missing" / "averages.pt")


def test_the_longest_possible_file_name_is_supported(tmp_path):
    path = tmp_path / ("é" * 126 + ".pt")
    _save_ema_model(path)
    assert list(tmp_path.iterdir()) == [path]
