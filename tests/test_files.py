"""Files that the package, the examples and the benchmarks write: all of them or nothing, with the user's umask."""

import io
import os
import resource
import signal
import stat
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch_aclnn_ops._files import replacing
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from host_npu.testing import outcomes, run
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


def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(writer, monkeypatch):
    write, path = writer

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


ATOMIC_WRITERS = {name: WRITERS[name] for name in ("averages.pt", "performance.md", "results.csv", "plot.png")}


@pytest.fixture(params=ATOMIC_WRITERS)
def atomic_writer(request, tmp_path):
    """What writes a file by ``_files.replacing``, and the file, which has older contents."""
    path = tmp_path / request.param
    path.write_bytes(b"old")
    return ATOMIC_WRITERS[request.param], path


def test_the_target_of_a_symbolic_link_is_replaced(atomic_writer):
    write, path = atomic_writer
    link = path.parent / "links" / path.name
    link.parent.mkdir()
    link.symlink_to(path)
    write(link)
    assert link.is_symlink() and path.read_bytes() != b"old"
    assert sorted(path.parent.iterdir()) == sorted([path, link.parent]) and list(link.parent.iterdir()) == [link]


def test_the_missing_target_of_a_symbolic_link_is_created(tmp_path):
    (tmp_path / "link").symlink_to("averages.pt")
    _save_ema_model(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert list(torch.load(tmp_path / "averages.pt")) == ["weight", "bias"]


def test_a_circular_symbolic_link_raises_oserror(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(OSError, match=f"{tmp_path}/link"):
        _save_ema_model(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


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


def save_to_standard_output(device, path=None):
    """Save where the standard output is a file or a pipe, and return what it got."""
    if path is None:
        reader, writer = os.pipe()
    else:
        reader = writer = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(writer, 1)
    _save_ema_model("/dev/stdout")
    if path is not None:
        assert os.path.samestat(os.fstat(1), os.stat(path))
        os.lseek(reader, 0, os.SEEK_SET)
    return os.read(reader, 10**5)


@pytest.mark.parametrize("name", [None, "output"], ids=["pipe", "file"])
def test_standard_output_is_written_to(name, tmp_path):
    [contents] = run(save_to_standard_output, 1, *([tmp_path / name] if name else []), backend="")
    assert list(torch.load(io.BytesIO(contents))) == ["weight", "bias"]


def test_a_full_device_raises_oserror_with_its_name():
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '/dev/full'"):
        _save_ema_model("/dev/full")


def test_a_full_disk_raises_oserror_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "averages.pt"
    path.write_bytes(b"old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limit[1]))
    try:
        with pytest.raises(OSError, match=rf"\[Errno 27\] File too large: '{path}'"):
            _save_ema_model(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_raises_oserror_with_the_file_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/missing/averages.pt'"):
        _save_ema_model(tmp_path / "missing" / "averages.pt")


def error_of_nobody(device, folder):
    """Return the error of a user who may not write to a folder."""
    folder.chmod(0o755)
    os.seteuid(65534)
    try:
        with replacing(folder / "averages.pt"):
            pass
    except PermissionError as error:
        return str(error)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody who may not write")
def test_a_read_only_folder_raises_oserror_with_the_file_name():
    with tempfile.TemporaryDirectory() as folder:
        [error] = run(error_of_nobody, 1, Path(folder), backend="")
    assert f"Permission denied: '{folder}/averages.pt'" in error


def test_the_longest_possible_file_name_is_supported(tmp_path):
    path = tmp_path / ("é" * 126 + ".pt")
    _save_ema_model(path)
    assert list(tmp_path.iterdir()) == [path]


def be_killed_while_writing(device, path):
    """End in the middle of a file."""
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_temporary_file_of_a_killed_process_is_removed_by_the_next_save(tmp_path):
    path, other = tmp_path / "averages.pt", tmp_path / ".averages.pt.backup"
    other.touch()
    [killed] = outcomes(be_killed_while_writing, 1, path, backend="")
    assert killed.exit_status == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2 and not path.exists()
    _save_ema_model(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def save_while_another_writes(device, path):
    """Save while another process is writing to the same file; return the number of files then, and the contents."""
    (ready, is_ready), (done, is_done) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(is_done)
        with replacing(path) as file:
            file.write(b"new")
            file.flush()
            os.write(is_ready, b"1")
            os.read(done, 1)
        os._exit(0)
    os.read(ready, 1)
    _save_ema_model(path)
    found = len(os.listdir(path.parent)), list(torch.load(path))
    os.close(is_done)
    assert os.waitpid(child, 0)[1] == 0
    return found


def test_the_temporary_file_of_a_running_process_is_not_removed(tmp_path):
    path = tmp_path / "averages.pt"
    assert run(save_while_another_writes, 1, path, backend="") == [(2, ["weight", "bias"])]
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_threads_writing_the_same_file_leave_one_complete_file(tmp_path):
    path = tmp_path / "name"

    def write(contents):
        with replacing(path) as file:
            file.write(contents)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, [bytes([i]) * 100_000 for i in range(20)]))
    assert list(tmp_path.iterdir()) == [path]
    assert len(path.read_bytes()) == 100_000 and len(set(path.read_bytes())) == 1
