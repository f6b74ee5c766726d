"""Signals while the device computes, and tensors for other processes."""

import multiprocessing
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from tests._interrupted import LOSSES, interrupt_everywhere


@pytest.mark.parametrize("name", LOSSES)
def test_ctrl_c_in_backward_arrives_and_leaves_nothing_over(name):
    results, is_anything_left = interrupt_everywhere(name, "npu")
    assert set(results) == {"interrupted"} and not is_anything_left


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_a_tensor_is_not_shared_with_another_process_of_the_host_npu(kind):
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
