"""Gradient scaling of sharded parameters: an inf that one process finds skips the step of all."""

import inspect

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
import torch.distributed as dist
from host_npu.testing import run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests._distributed import DEVICES

PARTS = ("FSDP1", "FSDP1, use_orig_params", "FSDP2")


def _sharded(model, kind, device):
    if kind == "FSDP2":
        return fully_shard(model), torch.amp.GradScaler(device, init_scale=4.0)
    device_id = torch.device("cpu") if device == "cpu" else torch.device("npu", torch.npu.current_device())
    options = {"device_id": device_id, "use_orig_params": kind.endswith("use_orig_params")}
    # That of torch_npu 2.9 has no argument for the device.
    has_device = "device" in inspect.signature(ShardedGradScaler).parameters
    scaler = ShardedGradScaler(init_scale=4.0, **({"device": device} if has_device else {}))
    return FullyShardedDataParallel(model, **options), scaler


def _training(device):
    """Return for each kind whether a step without an inf and one with it changed the weights, and the scales."""
    found = {}
    for kind in PARTS:
        torch.manual_seed(0)
        model, scaler = _sharded(nn.Linear(4, 4, bias=False).to(device), kind, device)
        optimizer = FusedEmaAdam(model.parameters(), lr=0.1, ema_decay=0.5)
        found[kind] = []
        for factor in (1.0, float("inf")):
            optimizer.zero_grad()
            factors = torch.tensor([factor, 1.0, 1.0, 1.0], device=device)  # of the row in the first process
            scaler.scale((model(torch.ones(2, 4, device=device)) * factors).mean()).backward()
            before = [param.detach().clone() for param in model.parameters()]
            scaler.step(optimizer)
            is_changed = any(not _local(a).equal(_local(b)) for a, b in zip(before, model.parameters(), strict=True))
            scaler.update()
            found[kind].append((is_changed, scaler.get_scale()))
    dist.barrier()
    return found


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.fixture(scope="module", params=DEVICES)
def found(request):
    return run(_training, 2, device=request.param)


@pytest.mark.parametrize("kind", PARTS)
def test_an_inf_in_the_shard_of_one_process_skips_the_step_of_all(found, kind):
    assert [of_rank[kind] for of_rank in found] == [[(True, 4.0), (False, 2.0)]] * 2
