"""Ctrl-C in a backward pass, at each of the operators that it calls."""

import contextlib
import gc
import itertools
import signal
import time

from torch_aclnn_ops import functional as F

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_INDICES = torch.tensor([1, 5, 1, 0])
LOSSES = {
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 2),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()),
    "embedding": lambda x: F.embedding(_INDICES.to(x.device), x, padding_idx=1, scale_grad_by_freq=True).square().sum(),
    "linear_cross_entropy": lambda x: (
        F.linear_cross_entropy(x, x, _INDICES.repeat(2).to(x.device), reduction="none").square().sum()
    ),
}


class _Interruption(TorchDispatchMode):
    """Sends the signal of Ctrl-C before the n-th operator."""

    def __init__(self, nth):
        super().__init__()
        self.operators_left = nth

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators_left -= 1
        if self.operators_left == 0:
            signal.raise_signal(signal.SIGINT)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _ctrl_c_raises():
    """What a shell starts in the background ignores Ctrl-C, and Python leaves it so."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@_ctrl_c_raises()
def interrupt_everywhere(name, device):
    """Interrupt a backward pass at every operator; return what came of each, and whether anything is left over."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator).to(device).requires_grad_()
    [expected] = torch.autograd.grad(LOSSES[name](x), [x])
    before = _alive(device)
    results = []
    for nth in itertools.count(1):
        interruption = _Interruption(nth)
        loss = LOSSES[name](x)
        try:
            with interruption:
                torch.autograd.grad(loss, [x])
            result = "no KeyboardInterrupt"
        except KeyboardInterrupt:
            result = "interrupted"
        is_over = interruption.operators_left > 0
        del loss, interruption
        if is_over:
            return results, _is_anything_left(device, before)
        [gradient] = torch.autograd.grad(LOSSES[name](x), [x])
        if not torch.equal(gradient, expected):
            result = "the next gradient is another one"
        del gradient
        results.append(result)


def _is_anything_left(device, before):
    """Return whether more is alive than before, where some of what other tests have left may be gone."""
    for _ in range(50):
        if all(now <= then for now, then in zip(_alive(device), before, strict=True)):
            return False
        # The autograd engine's thread of a device lets go of the exception a moment after the caller has got it.
        time.sleep(0.1)
    return True


def _alive(device):
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return tensors, torch.npu.memory_allocated() if device == "npu" else 0
