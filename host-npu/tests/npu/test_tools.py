"""What programs use besides operators: profilers, utilization, memory of the host, processes."""

import multiprocessing

import pytest
import torch
import torch_npu
from host_npu import testing
from torch.profiler import ProfilerActivity, profile


@pytest.mark.parametrize("activities", [None, [ProfilerActivity.CPU]], ids=["all activities", "CPU"])
def test_the_profiler_of_torch_records_what_the_cpu_does(activities):
    x = torch.rand(4, 4, device="npu")
    with profile(activities=activities) as profiler:
        torch_npu.npu_swiglu(x)
    assert "npu::npu_swiglu" in {each.key for each in profiler.key_averages()}


def _profile(device: str, folder: str) -> None:
    handler = torch_npu.profiler.tensorboard_trace_handler(folder)
    with torch_npu.profiler.profile(on_trace_ready=handler) as profiler:
        result = torch.ones(3, device=device).sum()
        profiler.step()
    assert result.item() == 3


def test_the_profiler_of_torch_npu_says_why_it_records_nothing(tmp_path):
    [outcome] = testing.outcomes(_profile, 1, str(tmp_path), device="npu", devices=2, backend="")
    assert outcome.exit_status == 0, outcome.error
    assert "does not simulate the profiler of NPUs" in outcome.output


def test_an_idle_device_is_used_by_nobody():
    torch.npu.synchronize()
    assert torch.npu.utilization() == 0


def test_a_busy_device_is_used():
    stream = torch.npu.Stream()
    x = torch.rand(512, 4096, device="npu")

    def utilization_while_it_works():
        with torch.npu.stream(stream):
            for _ in range(50):
                torch_npu.npu_swiglu(x)
        return torch.npu.utilization()

    # On a busy machine the device may be done before this thread asks.
    assert any(utilization_while_it_works() == 100 for _ in range(20))
    stream.synchronize()


def test_pinned_memory_is_copied_without_waiting():
    pinned = torch.arange(5.0).pin_memory()
    assert pinned.is_pinned()
    assert pinned.to("npu", non_blocking=True).tolist() == [0, 1, 2, 3, 4]


def test_a_tensor_in_a_queue_of_processes_is_refused_and_the_process_goes_on():
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    x = torch.ones(2, device="npu")
    with pytest.raises(RuntimeError, match=r"shared between processes: send a copy on the CPU, tensor.cpu\(\)"):
        queue.put(x)
    queue.put(x.cpu())
    assert queue.get().tolist() == x.tolist() == [1, 1]


def _use(rank, queue):
    # Free memory is asked for first, before there is a context on any device.
    queue.put((torch.npu.mem_get_info()[0] > 0, torch.full((2,), rank, device=f"npu:{rank}").sum().item()))


def test_child_processes_have_host_npus_too():
    queue = multiprocessing.get_context("spawn").Queue()
    torch.multiprocessing.spawn(_use, (queue,), nprocs=2)
    assert sorted(queue.get(timeout=100) for _ in range(2)) == [(True, 0), (True, 2)]


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="Inductor of torch 2.9 looks for a driver of triton first")
def test_inductor_names_the_backends_that_run():
    with pytest.raises(Exception, match='generates no code for the host NPU: use backend="aot_eager"'):
        torch.compile(lambda x: x.cos() + 1)(torch.rand(4, device="npu"))
