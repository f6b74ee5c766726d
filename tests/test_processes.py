"""Forked processes, and the first call of a process."""

import json
import os
import signal

from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from host_npu.testing import run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

NO_REINITIALISATION = (
    "RuntimeError: Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the "
    "'spawn' start method"
)


class Training:
    """A small model whose loss goes through every drop-in."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.device, self.losses = device, []
        self.model = torch.nn.Sequential(nn.Embedding(40, 8), torch.nn.Linear(8, 8), torch.nn.Sigmoid()).to(device)
        self.optimizer = FusedEmaAdam(self.model.parameters(), lr=1e-2)

    def steps(self, number):
        for _ in range(number):
            tokens = torch.arange(17, device=self.device) + len(self.losses)
            hidden = self.model(tokens[:-1])
            loss = F.linear_cross_entropy(hidden, self.model[0].weight, tokens[1:])
            loss = loss + F.mse_loss(hidden, hidden.detach() + 1) + F.binary_cross_entropy(hidden, hidden.detach())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        return self.losses


def _forked(calls):
    """Make each call in a separate forked process; return its result or exception."""
    results = []
    for call in calls:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            signal.alarm(60)  # ends a hanging process
            try:
                result = call()
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            os.write(writer, json.dumps(result, default=repr).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as file:
            results.append(json.loads(file.read() or '"it hangs"'))
        os.waitpid(child, 0)
    return results


def fork_and_train(device):
    """Continue training in both processes after a fork."""
    torch.set_num_threads(2)
    training = Training(device)
    training.steps(3)

    def train_in_one_thread():
        torch.set_num_threads(1)
        torch.rand(2**20).exp_()  # large enough for torch to divide among threads
        return training.steps(3)

    torch.rand(2**20).exp_()
    [there] = _forked([train_in_one_thread])
    return training.steps(3), there


def test_a_process_forked_after_use_trains_on_the_cpu():
    [(here, there)] = run(fork_and_train, 1, backend="")
    assert here == there and len(here) == 6


def fork_and_use_the_device(device):
    """Return the outcomes of a forked process's calls on its parent's device, and whether the parent trains on."""
    training = Training(device)
    training.steps(3)
    weight = training.model[0].weight
    calls = [
        lambda: torch.ones(2, device=device),
        lambda: F.mse_loss(weight, weight.detach()),
        lambda: torch.ops.torch_aclnn_ops.mse_loss_backward(*[weight.detach()] * 3, 1),
        training.optimizer.step,
    ]
    return _forked(calls), training.steps(3) == Training(device).steps(6)


def test_a_process_forked_after_use_cannot_use_the_npu_but_its_parent_can():
    [(refused, parent_trains_on)] = run(fork_and_use_the_device, 1, device="npu", backend="")
    assert set(refused) == {NO_REINITIALISATION}
    assert parent_trains_on


ROWS, HEAD, LABELS = torch.rand(4, 3), torch.rand(5, 3), torch.arange(4)
CALLS = {
    "mse_loss": lambda x: F.mse_loss(x, ROWS),
    "linear_cross_entropy": lambda x: F.linear_cross_entropy(x, HEAD, LABELS),
}


def _with_fake_tensors(call):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call(mode.from_tensor(torch.ones(4, 3)).requires_grad_()).backward()


PLACES = {
    "torch.jit.trace": lambda call: torch.jit.trace(call, torch.ones(4, 3, requires_grad=True), check_trace=False),
    "make_fx": lambda call: make_fx(call)(torch.ones(4, 3)),
    "FakeTensorMode": _with_fake_tensors,
    "vmap of grad": lambda call: torch.vmap(torch.func.grad(call))(torch.ones(2, 4, 3)),
    "inference_mode": lambda call: torch.inference_mode()(call)(torch.ones(4, 3)),
}


def gradient_after(device, place, name):
    """Make the first call of this process, which loads the compiled parts, in a place; return a usual gradient."""
    PLACES[place](CALLS[name])
    x = torch.ones(4, 3, requires_grad=True)
    return torch.autograd.grad(CALLS[name](x), x)[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CALLS)
def test_the_first_call_of_a_process_may_be_anywhere(name, place):
    [gradient] = run(gradient_after, 1, place, name, backend="")
    assert gradient.isfinite().all()
