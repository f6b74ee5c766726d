"""What programs use besides operators: profilers, utilization, memory of the host, processes, messages to oneself."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
import torch_npu
from host_npu import _operators, testing
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


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_child_processes_have_host_npus_too(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    torch.multiprocessing.start_processes(_use, (queue,), nprocs=2, start_method=method)
    assert sorted(queue.get(timeout=100) for _ in range(2)) == [(True, 0), (True, 2)]


def test_a_rank_sends_to_itself_in_a_batch(tmp_path):
    dist.init_process_group("hccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sent, received = torch.arange(3.0).npu(), torch.zeros(3, device="npu")
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, received, 0)])
        for work in works:
            work.wait()
        assert received.tolist() == [0, 1, 2]
    finally:
        dist.destroy_process_group()


def test_attention_has_the_gradient_of_a_learned_bias():
    attention = torch.nn.functional.scaled_dot_product_attention
    on_cpu = [torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 8)]
    on_npu = [each.npu().requires_grad_() for each in on_cpu]
    for x, bias in (on_npu, [each.requires_grad_() for each in on_cpu]):
        attention(x, x, x, bias).sin().sum().backward()
    for actual, expected in zip(on_npu, on_cpu, strict=True):
        torch.testing.assert_close(actual.grad.cpu(), expected.grad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_run_by_backends_that_generate_no_code(backend):
    x = torch.rand(4, device="npu", requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="Inductor of torch 2.9 looks for a driver of triton first")
def test_inductor_names_the_backends_that_run():
    with pytest.raises(Exception, match='generates no code for the host NPU: use backend="aot_eager"'):
        torch.compile(lambda x: x.cos() + 1)(torch.rand(4, device="npu"))


@pytest.mark.parametrize(
    ("name", "note"),
    [
        pytest.param(
            "scatter_reduce",
            "PyTorch's own operators run on the host NPU all the same: aten.scatter_reduce",
            marks=pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch_npu 2.9 does not ask for it"),
        ),
        ("polar", "PyTorch's own operators run on the host NPU all the same: aten.polar"),
        ("npu_dynamic_quant", "torch_npu selects the version by chip and arguments; a refused one raises"),
        ("npu_quant_lightning_indexer", "aclnn"),
        ("npu_swiglu", "aclnn"),
    ],
)
def test_the_list_ends_with_what_is_refused_and_what_that_means(name, note):
    *lines, last = _operators.found(name)
    assert last.startswith(note)
    refused = [line.endswith(": refused") for line in lines]
    assert refused == sorted(refused)
