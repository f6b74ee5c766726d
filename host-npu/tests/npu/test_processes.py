"""Device memory belongs to its process: a tensor for another one is refused, and the cure is named."""

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
    assert torch.ones(2, device="npu").sum().item() == 2
