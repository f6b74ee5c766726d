"""The first call of a process, which loads what is compiled, in each place where a call can be: one process a case."""

import os
import sys
from collections.abc import Callable

from torch_aclnn_ops import functional

import torch
import torch._dynamo  # else each process would import it in its first call, which takes longest
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

_ROWS, _HEAD, _LABELS = torch.rand(4, 3), torch.rand(5, 3), torch.arange(4)
CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mse_loss": lambda x: functional.mse_loss(x, _ROWS),
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(x.sigmoid(), _ROWS),
    "embedding": lambda x: functional.embedding(_LABELS, x).sum(),
    "linear_cross_entropy": lambda x: functional.linear_cross_entropy(x, _HEAD, _LABELS),
}


def _with_fake_tensors(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call(mode.from_tensor(torch.ones(4, 3)).requires_grad_()).backward()


PLACES: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], object]] = {
    "torch.jit.trace": lambda call: torch.jit.trace(call, torch.ones(4, 3, requires_grad=True), check_trace=False),
    "make_fx": lambda call: make_fx(call)(torch.ones(4, 3)),
    "FakeTensorMode": _with_fake_tensors,
    "vmap of grad": lambda call: torch.vmap(torch.func.grad(call))(torch.ones(2, 4, 3)),
    "inference_mode": lambda call: torch.inference_mode()(call)(torch.ones(4, 3)),
}


def _is_right_afterwards(call: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    x = torch.ones(4, 3, dtype=torch.float32, device="cpu", requires_grad=True)
    (gradient,) = torch.autograd.grad(call(x), x)
    return bool(gradient.isfinite().all()) and gradient.device.type == "cpu"


def main() -> None:
    """Run every call in every place, and print those that end in an error."""
    for place, run in PLACES.items():
        for name, call in CALLS.items():
            if child := os.fork():
                if os.waitpid(child, 0)[1] != 0:
                    print(f"{name} in {place}")
                continue
            try:
                run(call)
                os._exit(0 if _is_right_afterwards(call) else 1)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)


if __name__ == "__main__":
    main()
