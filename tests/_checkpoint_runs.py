"""Runs of FusedEmaAdam whose state dicts are changed, and everything that an optimizer keeps, to be compared."""

import copy
import warnings
from functools import cache

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

CONFIGURATIONS = {
    "float32": (torch.float32, {}),
    "masters": (torch.bfloat16, {}),
    "16-bit states": (torch.bfloat16, {"master_weights": False}),
    "float32 flat": (torch.float32, {"flatten": True}),
    "masters flat": (torch.bfloat16, {"flatten": True}),
    "16-bit states flat": (torch.bfloat16, {"master_weights": False, "flatten": True}),
}
each_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS)


def each_configuration_and_case(cases):
    """Run every case with one of the configurations, by turns; the other pairs are exhaustive."""
    pairs = [
        pytest.param(configuration, case, marks=[pytest.mark.exhaustive] if (i + j) % len(CONFIGURATIONS) else [])
        for i, configuration in enumerate(CONFIGURATIONS)
        for j, case in enumerate(cases)
    ]
    return pytest.mark.parametrize("configuration, case", pairs)


class Run:
    """Two parameter groups, with an optimizer that has done some steps."""

    def __init__(self, configuration, steps, seed=0, **options):
        dtype, more = CONFIGURATIONS[configuration]
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
        groups = [{"params": layer.parameters()} for layer in self.model]
        self.optimizer = FusedEmaAdam(groups, **{"lr": 0.1, "ema_decay": 0.9, **more, **options})
        self.train(steps)

    def train(self, steps, first=0):
        for step in range(first, first + steps):
            torch.manual_seed(step)
            self.optimizer.zero_grad()
            inputs = torch.randn(5, 4, dtype=self.model[0].weight.dtype)
            self.model(inputs).square().mean().backward()
            self.optimizer.step()

    def contents(self):
        """Everything that the optimizer keeps, with the averages as a swap shows them."""
        with self.optimizer.swap_ema_params():
            averages = [param.detach().clone() for param in self.model.parameters()]
        weights = [param.detach().clone() for param in self.model.parameters()]
        return copy.deepcopy([self.optimizer.state_dict(), averages, weights])

    def objects(self):
        """The objects themselves: what is unchanged is also not replaced."""
        optimizer = self.optimizer
        states = [list(state.items()) for state in optimizer.state.values()]
        buffers = [(buffer, buffer.weights) for group in optimizer._flat_groups.values() for buffer in group.buffers]
        addresses = [param.data_ptr() for param in self.model.parameters()]
        groups = [list(group.items()) for group in optimizer.param_groups]
        return [optimizer.state, states, buffers, addresses, optimizer.param_groups, groups]


def are_same(first, second):
    """Compare nested lists and dicts, tensors bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(are_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(are_same, first, second))
    return first is second or first == second


def are_identical(first, second):
    """Compare nested lists and tuples, and the objects in them by identity."""
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(are_identical, first, second))
    return first is second or (isinstance(first, (int, str)) and first == second)


@cache
def _state_dict_of_another(configuration):
    return Run(configuration, 7, seed=1, lr=0.5, eps=1e-6).optimizer.state_dict()


def checkpoint_of(configuration):
    """Another run's state dict."""
    return copy.deepcopy(_state_dict_of_another(configuration))


@cache
def undisturbed_contents(configuration, steps):
    return Run(configuration, steps).contents()


def state(name, change):
    """Change a tensor of parameter 1 of group 0, whose shape is [3]."""

    def spoil(checkpoint):
        checkpoint["state"][1][name] = change(checkpoint["state"][1][name])

    return spoil


def step(value):
    return state("step", lambda _: value)


def option(name, value):
    """Change an option of group 1."""
    return lambda checkpoint: checkpoint["param_groups"][1].update({name: value})


def entry(name, value):
    return lambda checkpoint: checkpoint.update({name: value})


def without(*path):
    def spoil(checkpoint):
        for key in path[:-1]:
            checkpoint = checkpoint[key]
        del checkpoint[path[-1]]

    return spoil


def swap(first, second):
    def spoil(checkpoint):
        states = checkpoint["state"]
        states[first], states[second] = states[second], states[first]

    return spoil


def expanded(tensor):
    return tensor[:1].clone().expand(3)


def quantized(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 says that they are deprecated
        return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


class Subclass(torch.Tensor):
    pass
