"""linear_cross_entropy: the memory of its logits."""

import mmap
import weakref

from torch_aclnn_ops.ops.linear_cross_entropy import _buffers

import pytest
import torch


@pytest.fixture
def on_a_machine_of_its_own(monkeypatch):
    monkeypatch.setattr(_buffers, "_host_takes_free_memory", lambda: False)


@pytest.mark.parametrize(
    ("order", "taken"),
    [("9\n", True), ("0\n", True), ("-1\n", False), ("11\n", False), ("4294967295?", False), (None, False)],
)
def test_memory_that_a_host_takes_back_is_known_by_linuxs_parameter(monkeypatch, tmp_path, order, taken):
    path = tmp_path / "page_reporting_order"
    if order is not None:
        path.write_text(order)
    monkeypatch.setattr(_buffers, "_REPORTED_ORDER", path)
    assert _buffers._host_takes_free_memory.__wrapped__() == taken


def test_a_large_buffer_is_the_allocators_where_the_host_takes_free_memory(monkeypatch):
    monkeypatch.setattr(_buffers, "_FEWEST_BYTES", 1000)
    monkeypatch.setattr(_buffers, "_host_takes_free_memory", lambda: True)
    monkeypatch.setattr(_buffers.mmap, "mmap", lambda *args, **kwargs: pytest.fail("asked the system"))
    assert _buffers.empty((30, 50), torch.zeros(1), torch.float32).shape == (30, 50)


@pytest.mark.usefixtures("on_a_machine_of_its_own")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_large_buffer_is_memory_of_its_own_that_is_given_back(monkeypatch, dtype):
    made = []

    class Memory(mmap.mmap):
        def __init__(self, *args, **kwargs):
            made.append(weakref.ref(self))

    monkeypatch.setattr(_buffers, "_FEWEST_BYTES", 1000)
    monkeypatch.setattr(_buffers.mmap, "mmap", Memory)
    buffer = _buffers.empty((30, 50), torch.zeros(1), dtype)
    assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == ((30, 50), dtype, True)
    part = buffer.fill_(3)[1:]
    del buffer
    assert len(made) == 1 and made[0]() is not None and part.eq(3).all()
    del part
    assert made[0]() is None


@pytest.mark.usefixtures("on_a_machine_of_its_own")
def test_a_large_buffer_does_without_large_pages_where_the_system_has_none(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, advice):
            raise OSError("Invalid argument")

    monkeypatch.setattr(_buffers, "_FEWEST_BYTES", 1000)
    monkeypatch.setattr(_buffers.mmap, "mmap", Memory)
    assert _buffers.empty((30, 50), torch.zeros(1), torch.float32).fill_(2).sum() == 3000


@pytest.mark.usefixtures("on_a_machine_of_its_own")
@pytest.mark.parametrize("shape", [(0, 7), (3, 5)])
def test_a_small_buffer_is_the_allocators(monkeypatch, shape):
    monkeypatch.setattr(_buffers.mmap, "mmap", lambda *args, **kwargs: pytest.fail("asked the system"))
    assert _buffers.empty(shape, torch.zeros(1, dtype=torch.bfloat16), torch.float32).shape == shape
