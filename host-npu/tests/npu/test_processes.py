"""Child processes have host NPUs; device memory belongs to one process, and sharing a tensor is refused."""

import multiprocessing
from multiprocessing.reduction import ForkingPickler

import pytest
import torch


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_a_tensor_is_not_shared_with_another_process(kind):
    tensor = kind(torch.rand(3, device="npu"))
    with pytest.raises(RuntimeError, match=r"device memory shared between processes: .* tensor.cpu\(\)"):
        ForkingPickler.dumps(tensor)


def test_a_queue_reports_that_it_does_not_share_a_tensor_and_the_process_goes_on(capfd):
    queue = multiprocessing.get_context("spawn").Queue()
    queue.put(torch.rand(3).npu())
    queue.close()
    queue.join_thread()
    assert "does not simulate device memory shared between processes" in capfd.readouterr().err
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with pytest.raises(RuntimeError, match=r"shared between processes: send a copy on the CPU, tensor.cpu\(\)"):
        queue.put(torch.rand(3).npu())
    queue.put(torch.ones(2, device="npu").cpu())
    assert queue.get().tolist() == [1, 1]


def _use(rank, queue):
    # Free memory is queried first, before any device has a context.
    free = torch.npu.mem_get_info()[0] > 0
    queue.put((free, [torch.full((2,), 3.0, device=f"npu:{device}").sum().item() for device in range(2)]))


def test_a_child_process_has_host_npus_too():
    queue = multiprocessing.get_context("spawn").Queue()
    torch.multiprocessing.spawn(_use, (queue,))
    assert queue.get(timeout=100) == (True, [6, 6])
