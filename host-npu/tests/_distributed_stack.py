"""Features of torch.distributed that use collectives, for test_distributed_stack.py: cases for CPUs and NPUs."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from host_npu import testing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, STEPS = 12, 6, 4


class Model(nn.Module):
    """Three layers of odd sizes, one of which is used by even batches only."""

    def __init__(self, has_branch=False):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 17), nn.Linear(17, 7)
        self.branch = nn.Linear(7, 7) if has_branch else None

    def forward(self, input, takes_branch=False):
        hidden = self.second(torch.tanh(self.first(input)))
        return self.branch(hidden) if takes_branch else hidden


def _make(device, **options):
    torch.manual_seed(0)
    return Model(**options).to(device)


def _batch(device, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=generator).to(device, dtype)


def _train(device, model, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = model(_batch(device, step), **options).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + _whole(model.parameters())


def _whole(tensors):
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach() for tensor in tensors]


def ddp_with_many_buckets(device, folder):
    return _train(device, DistributedDataParallel(_make(device), bucket_cap_mb=0.0005))


def ddp_with_unused_parameters(device, folder):
    model = DistributedDataParallel(_make(device, has_branch=True), find_unused_parameters=True)
    found = []
    for takes_branch in (True, False):
        found += _train(device, model, takes_branch=takes_branch)
    return found


def ddp_with_16_bit_gradients(device, folder):
    model = DistributedDataParallel(_make(device))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return _train(device, model)


def ddp_with_batch_norm_over_all_ranks(device, folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).to(device)
    return _train(device, DistributedDataParallel(model)) + list(model[1].buffers())


def _shard(model, **options):
    for layer in (model.first, model.second):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp(device, folder):
    model = _shard(_make(device))
    return _train(device, model, torch.optim.AdamW(model.parameters()))


def fsdp_in_16_bits(device, folder):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _train(device, _shard(_make(device), mp_policy=policy))


def hsdp(device, folder):
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return _train(device, _shard(_make(device), mesh=mesh))


def zero(device, folder):
    model = DistributedDataParallel(_make(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    found = _train(device, model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return found


def tensor_parallel(device, folder):
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(1)
    input = torch.randn(ROWS, WIDTH).to(device)
    model(input).square().mean().backward()
    return _whole([model(input), *(weight.grad for weight in model.parameters())])


def dtensors(device, folder):
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    tensor = torch.arange(35.0).reshape(5, 7).to(device)
    sharded = distribute_tensor(tensor, mesh, [Shard(0)])
    other = sharded.redistribute(placements=[Shard(1)])
    product = sharded @ distribute_tensor(tensor.t().contiguous(), mesh, [Replicate()])
    return [sharded.to_local(), other.to_local(), *_whole([sharded, other, product, sharded.sum(), other.max()])]


def a_checkpoint_of_shards(device, folder):
    def start():
        model = _shard(_make(device))
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    model, optimizer = start()
    _train(device, model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{device}")
    model, optimizer = start()
    weights, state = get_state_dict(model, optimizer)
    contents = {"model": weights, "optimizer": state}
    dcp.load(contents, checkpoint_id=f"{folder}/{device}")
    set_state_dict(model, optimizer, model_state_dict=contents["model"], optim_state_dict=contents["optimizer"])
    return _train(device, model, optimizer)


def functional_collectives(device, folder):
    tensor = torch.full((2, 3), dist.get_rank() + 1.0, device=device, requires_grad=True)
    world = dist.group.WORLD
    found = [
        functional.all_reduce(tensor.detach(), "sum", world),
        functional.all_gather_tensor(tensor.detach(), 0, world),
        functional.all_to_all_single_autograd(tensor, None, None, world),
    ]
    found[-1].square().sum().backward()
    return [*found, tensor.grad]


def objects(device, folder):
    """Python objects of different sizes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "list": [rank] * 100 * rank}
    gathered, at_root = [None] * world_size, [None] * world_size if rank == 0 else None
    dist.all_gather_object(gathered, mine)
    dist.gather_object(mine, at_root, 0)
    broadcast, scattered = [mine, rank], [None]
    dist.broadcast_object_list(broadcast, 1)
    dist.scatter_object_list(scattered, gathered if rank == 0 else None, 0)
    return [gathered, at_root, broadcast, scattered]


def two_streams(device, folder):
    """Collectives of two groups on a stream each, between products that produce and consume their tensors."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.full((300, 300), float(dist.get_rank() + scale)).to(device) for scale in (1, 2)]
    if device == "cpu":
        for tensor, group in zip(tensors, groups, strict=True):
            for _ in range(5):
                tensor.mul_(0.5)
                dist.all_reduce(tensor, group=group)
        return tensors
    streams = [torch.npu.Stream() for _ in groups]
    for stream in streams:
        stream.wait_stream(torch.npu.current_stream())
    for _ in range(5):
        for stream, tensor, group in zip(streams, tensors, groups, strict=True):
            with torch.npu.stream(stream):
                tensor.mul_(0.5)
                dist.all_reduce(tensor, group=group, async_op=True).wait()
    for stream, tensor in zip(streams, tensors, strict=True):
        torch.npu.current_stream().wait_stream(stream)
        tensor.record_stream(stream)
    return tensors


CASES = {
    2: (
        ddp_with_many_buckets,
        ddp_with_unused_parameters,
        ddp_with_16_bit_gradients,
        ddp_with_batch_norm_over_all_ranks,
        fsdp,
        fsdp_in_16_bits,
        zero,
        tensor_parallel,
        dtensors,
        a_checkpoint_of_shards,
        functional_collectives,
        objects,
        two_streams,
    ),
    4: (hsdp, dtensors, tensor_parallel, fsdp),
}


def results(device, folder, world_size):
    """Return the result of each case."""
    return testing.results_of((case.__name__, lambda case=case: case(device, folder)) for case in CASES[world_size])
