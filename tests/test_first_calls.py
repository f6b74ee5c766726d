"""The first call of a process, which loads what is compiled, in each place where a call can be."""

from torch_aclnn_ops import functional

import pytest
import torch
from host_npu.testing import run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

_ROWS, _HEAD, _LABELS = torch.rand(4, 3), torch.rand(5, 3), torch.arange(4)
CALLS = {
    "mse_loss": lambda x: functional.mse_loss(x, _ROWS),
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(x.sigmoid(), _ROWS),
    "embedding": lambda x: functional.embedding(_LABELS, x).sum(),
    "linear_cross_entropy": lambda x: functional.linear_cross_entropy(x, _HEAD, _LABELS),
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
    """Make the first call of this process in a place; return the gradient of a usual one."""
    PLACES[place](CALLS[name])
    x = torch.ones(4, 3, requires_grad=True)
    return torch.autograd.grad(CALLS[name](x), x)[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CALLS)
def test_the_first_call_of_a_process_may_be_anywhere(name, place):
    [gradient] = run(gradient_after, 1, place, name, backend="")
    assert gradient.isfinite().all()
