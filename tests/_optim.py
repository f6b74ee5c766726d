"""Models, gradients and comparisons for the tests of the optimizer."""

from contextlib import contextmanager

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_flatten = pytest.mark.parametrize("flatten", [False, True], ids=["one by one", "flattened"])
STATE = ("step", "exp_avg", "exp_avg_sq", "ema_params")
SETTINGS = {"lr": 1e-2, "ema_decay": 0.9}
_FLAGS = {"decoupled_weight_decay": True, "bias_correction": True, "maximize": False}
OPTIONS = {**SETTINGS, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, **_FLAGS}
# Options that all differ from the defaults.
GROUP_OPTIONS = {"lr": 0.1, "betas": (0.5, 0.7), "eps": 0.1, "weight_decay": 0.3}
GROUP_OPTIONS |= {name: not value for name, value in _FLAGS.items()}
GROUP_OPTIONS |= {"ema_decay": 0.5, "ema_warmup": "ratio", "ema_start_step": 2, "ema_update_every": 2}
RESUMED_OPTIONS = {"weight_decay": 0.1, "betas": (0.8, 0.99), "ema_warmup": "ratio", "ema_update_every": 2}


class Weights(nn.Module):
    """Parameters of several shapes and layouts; torch's fused kernels are wrong for the last one's layout."""

    def __init__(self, dtype=torch.float64, seed=0, is_last_transposed=True):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(4, 3), (), (0, 2), (5,), (2, 3, 1)]
        weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        last = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        weights.append(last.T if is_last_transposed else last)
        self.weights = nn.ParameterList(nn.Parameter(weight.to(dtype)) for weight in weights)

    def set_gradients(self, step):
        """Set gradients that differ between steps and depend on the weights."""
        generator = torch.Generator().manual_seed(1000 + step)
        for weight in self.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
            weight.grad = noise + weight.detach() / 4


def train(model, optimizer, steps):
    for step in steps:
        model.set_gradients(step)
        optimizer.step()


def trained(dtype=torch.float64, steps=3, **options):
    """Return a model after some steps, and its optimizer."""
    model = Weights(dtype)
    optimizer = FusedEmaAdam(model.parameters(), **{**SETTINGS, **options})
    train(model, optimizer, range(steps))
    return model, optimizer


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def step_with(optimizer, number=1.0):
    """Do a step in which every element of every gradient is this number."""
    for param in params_of(optimizer):
        param.grad = torch.full_like(param, number)
    optimizer.step()


def weights_of(model):
    return [weight.detach().clone() for weight in model.parameters()]


def states_of(optimizer):
    """Return all tensors of the state, parameter by parameter."""
    states = [optimizer.state.get(param, {}) for param in params_of(optimizer)]
    return [state[name].clone() for state in states for name in (*STATE, "master_params") if name in state]


def contents_of(optimizer):
    """Return copies of the weights, and of all tensors of the state."""
    return [param.detach().clone() for param in params_of(optimizer)] + states_of(optimizer)


def averages_of(model, optimizer):
    return [optimizer.state[weight]["ema_params"] for weight in model.parameters()]


def averaged(averages, model, decay):
    """Return the averages after an update with a model's weights."""
    return [decay * old + (1 - decay) * new for old, new in zip(averages, weights_of(model), strict=True)]


def averaged_model(model, decay, **options):
    """Return torch's averaged model."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), **options)


def assert_all_equal(results, expected):
    assert len(results) == len(expected)
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


def assert_same(optimizer, other):
    """Compare weights and states bit for bit."""
    assert_all_equal(contents_of(optimizer), contents_of(other))


@contextmanager
def unchanged(optimizer):
    """Compare weights and states after the block with those before it, bit for bit."""
    before = contents_of(optimizer)
    yield
    assert_all_equal(contents_of(optimizer), before)


def assert_all_close(results, expected, atol):
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other.to(result.dtype), rtol=0, atol=atol)


def train_with_torch(model, optimizer, steps, ema_decay, scheduler=None):
    """Train with an optimizer of torch; return the averages of swa_utils, updated after each step.

    The first update copies the weights, as ``ema_start_step=1`` does.
    """
    averages = averaged_model(model, ema_decay)
    for step in steps:
        train(model, optimizer, [step])
        averages.update_parameters(model)
        if scheduler is not None:
            scheduler.step()
    return weights_of(averages.module)
