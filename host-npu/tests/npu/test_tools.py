"""Features other than operators that programs use: profilers, utilization, host memory."""

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


def test_a_dump_says_that_nothing_is_written(tmp_path, capfd):
    tmp_path.joinpath("dump.json").write_text("{}")
    torch.npu.set_dump(str(tmp_path / "dump.json"))
    assert "nothing is dumped" in capfd.readouterr().err


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

    # On a busy machine the device may finish before this thread queries it.
    assert any(utilization_while_it_works() == 100 for _ in range(20))
    stream.synchronize()


def test_pinned_memory_is_copied_without_waiting():
    pinned = torch.arange(5.0).pin_memory()
    assert pinned.is_pinned()
    assert pinned.to("npu", non_blocking=True).tolist() == [0, 1, 2, 3, 4]
