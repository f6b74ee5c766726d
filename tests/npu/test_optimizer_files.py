"""Files of a model and an optimizer with flattened parameters on an NPU, as other libraries write them."""

import torch_aclnn_ops  # noqa: F401  before accelerate, which imports torch_npu
from torch_aclnn_ops.optim import FusedEmaAdam, unwrap

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, load_model, save_model

from tests._optim import each_flatten


def _model_and_optimizer(flatten, device="npu"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)
    return model, FusedEmaAdam(model.parameters(), lr=0.1, ema_decay=0.5, flatten=flatten)


def _step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 64, device="npu")).square().mean().backward()
    optimizer.step()


def _copies(tensors):
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def _equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


@each_flatten
def test_accelerate_saves_and_loads_every_parameter(flatten, tmp_path):
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*_model_and_optimizer(flatten, "cpu"))
    assert next(model.parameters()).device.type == "npu"
    _step(model, optimizer)
    weights = _copies(model.state_dict())
    averages = _copies(unwrap(optimizer).ema_state_dict(model))
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "weights")
    with unwrap(optimizer).swap_ema_params():
        accelerator.save_model(model, tmp_path / "averages")
    _step(model, optimizer)
    accelerator.load_state(tmp_path / "state")
    assert _equal(_copies(model.state_dict()), weights)
    assert _equal(load_file(tmp_path / "weights" / "model.safetensors"), weights)
    assert _equal(load_file(tmp_path / "averages" / "model.safetensors"), averages)


@each_flatten
def test_safetensors_saves_and_loads_every_parameter(flatten, tmp_path):
    model, optimizer = _model_and_optimizer(flatten)
    _step(model, optimizer)
    weights = _copies(model.state_dict())
    save_model(model, tmp_path / "model.safetensors")
    _step(model, optimizer)
    load_model(model, tmp_path / "model.safetensors", device="npu:0")
    assert _equal(_copies(model.state_dict()), weights)
