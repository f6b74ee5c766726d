"""Trainings in several processes that the table of test_optimizer_matrix.py does not have."""

import io
import warnings
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch_aclnn_ops  # isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops.functional import fused_ema_adam
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from host_npu.testing import results_of
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

BATCH = 12  # divides by 2 and by 3 processes
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "ema_decay": 0.9, "ema_warmup": "ratio", "ema_start_step": 1}
DTYPES = {"cpu": torch.float64, "npu": torch.float32}  # HCCL does not add up float64


@dataclass(frozen=True)
class Process:
    """One of the processes that train together, or a single one."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    folder: str = ""
    rank: int = 0
    world_size: int = 1

    def model(self):
        """Return a model whose parameters 3 processes cannot share evenly."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7, dtype=torch.float64), nn.Tanh(), nn.Linear(7, 2, dtype=torch.float64))
        return model.to(self.dtype).to(self.device)

    def sharded_model(self):
        """Return a model with DTensor parameters."""
        model = self.model()
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer)
        return fully_shard(model)

    def train(self, model, optimizer, steps):
        """Train on this process's share of each batch."""
        for step in steps:
            batch = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            optimizer.zero_grad()
            share = batch.chunk(self.world_size)[self.rank].to(self.dtype).to(self.device)
            model(share).square().mean().backward()
            optimizer.step()


def whole(tensor):
    """Return a tensor with the shards of all processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def found(model, optimizer):
    """Return weights and averages."""
    weights = [whole(weight.detach()) for weight in model.parameters()]
    averages = [whole(optimizer.state[weight]["ema_params"]) for weight in model.parameters()]
    return weights, averages


def one_process(process):
    """The training without others."""
    model = process.model()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    process.train(model, optimizer, range(6))
    return found(model, optimizer)


def ddp_flattened_with_bucket_views(process):
    """Gradients that are parts of DDP's buckets."""
    model = DistributedDataParallel(process.model(), gradient_as_bucket_view=True)
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS, flatten=True)
    process.train(model, optimizer, range(6))
    return found(model, optimizer)


def fsdp(process):
    """fully_shard: parameters, states and the exported average are DTensors."""
    model = process.sharded_model()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    process.train(model, optimizer, range(6))
    state = optimizer.state[next(model.parameters())]
    assert all(type(state[name]).__name__ == "DTensor" for name in ("exp_avg", "exp_avg_sq", "ema_params"))
    weights, averages = found(model, optimizer)
    with optimizer.swap_ema_params():
        assert _are_equal((whole(weight.detach()) for weight in model.parameters()), averages)
    assert all(map(_are_equal, found(model, optimizer), (weights, averages)))
    assert _are_equal(map(whole, optimizer.ema_state_dict(model).values()), averages)
    return weights, averages


def fsdp_compiled(process):
    """fully_shard with a compiled step."""
    model = process.sharded_model()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    process.train(model, SimpleNamespace(zero_grad=optimizer.zero_grad, step=step), range(6))
    return found(model, optimizer)


def state_of_the_first(process):
    """Return the error of loading the first process's state, whose shards are larger than those of the last."""
    model = process.sharded_model()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    process.train(model, optimizer, range(1))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    contents = [buffer.getvalue()]
    dist.broadcast_object_list(contents, src=0)
    before = deepcopy(optimizer.state_dict())
    try:
        optimizer.load_state_dict(torch.load(io.BytesIO(contents[0]), weights_only=False))
    except ValueError as error:
        after = optimizer.state_dict()
        states = [
            [local(one) for state in each["state"].values() for one in state.values()] for each in (before, after)
        ]
        assert _are_equal(*states)
        return str(error)
    return None


def other_placements(process):
    """Return the errors of a state, and of a gradient of the function, that have other placements."""
    model = process.sharded_model()
    weight = next(model.parameters())
    optimizer = FusedEmaAdam([weight], **OPTIONS)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    whole_state = optimizer.state[weight]["exp_avg"].redistribute(placements=[Replicate()])
    optimizer.state[weight]["exp_avg"] = whole_state
    lists = [[weight.detach().clone()] for _ in range(5)]
    lists[1] = [whole_state]
    steps = [torch.zeros((), dtype=torch.int64, device=process.device)]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 0.0, "weight_decay": 0.0, "decoupled_weight_decay": True}
    options |= {"ema_decay": 0.5, "bias_correction": True, "maximize": False}
    errors = []
    for call in (optimizer.step, partial(fused_ema_adam, *lists, steps, **options)):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    return errors


def local(tensor):
    """Return this process's shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _are_equal(tensors, others):
    return all(torch.equal(*pair) for pair in zip(tensors, others, strict=True))


def adamw_then_one_process(process):
    """A run that begins with torch's AdamW, without others."""
    model = process.model()
    adamw = torch.optim.AdamW(model.parameters(), lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"])
    process.train(model, adamw, range(3))
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(adamw.state_dict())
    process.train(model, optimizer, range(3, 6))
    return found(model, optimizer)


def fsdp_checkpoint_of_adamw(process):
    """A run resumed from a torch.distributed.checkpoint of torch's AdamW, in a model with other weights."""
    path = f"{process.folder}/checkpoint_of_adamw"
    model = process.sharded_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"])
    process.train(model, adamw, range(3))
    weights, state = get_state_dict(model, adamw)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    model = process.sharded_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    weights, state = get_state_dict(model, optimizer)
    contents = {"model": weights, "optimizer": state}
    dcp.load(contents, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, optimizer, model_state_dict=contents["model"], optim_state_dict=contents["optimizer"])
    optimizer.reset_ema_params()
    process.train(model, optimizer, range(3, 6))
    return found(model, optimizer)


FUNCTIONS = (
    ddp_flattened_with_bucket_views,
    fsdp,
    # Dynamo of torch 2.9 cannot trace operators on shards of different sizes, nor can that of 2.14 guard them.
    *([fsdp_compiled] if (2, 12) <= torch.__version__ < (2, 14) else []),
    fsdp_checkpoint_of_adamw,
)
CASES = {function.__name__: function for function in FUNCTIONS}


def results(device, folder, names):
    """Run the cases of these names as one of the processes."""
    process = Process(device, DTYPES[device], folder, dist.get_rank(), dist.get_world_size())
    warnings.simplefilter("ignore")
    found = results_of((name, partial(CASES[name], process)) for name in names)
    found["state of the first"] = state_of_the_first(process)
    found["other placements"] = other_placements(process)
    return found | {"operators": {name for name, launches in torch_aclnn_ops.launches().items() if launches}}
