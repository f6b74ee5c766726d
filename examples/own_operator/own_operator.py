"""An operator of CANN in your own library: compiled, tested and differentiated without an NPU.

Run ``python -m host_npu examples/own_operator/own_operator.py`` from a checkout, where torch_npu, ninja and g++ are
installed. Only the host NPU of this project is used; ``mse_loss.cpp`` needs only torch_npu.
"""

import importlib.util
import os
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import host_npu
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils import cpp_extension

HERE = Path(__file__).parent


def load() -> None:
    """Compile the operators if necessary, and register them with PyTorch."""
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.origin is not None
    npu = Path(spec.origin).parent
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])  # where pip puts ninja
    build = HERE.parents[1] / "build" / "own_operator"
    build.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name="own_operator",
        sources=[str(HERE / "mse_loss.cpp")],
        # torch_npu 2.9 has CANN's headers in a separate folder.
        extra_include_paths=[str(npu / "include"), str(npu / "include" / "third_party" / "acl" / "inc")],
        extra_ldflags=[f"-L{npu / 'lib'}", "-ltorch_npu"],
        build_directory=str(build),
        is_python_module=False,
    )


class MseLoss(torch.autograd.Function):
    """The squared errors of all elements; the gradient of ``target`` is the negated gradient of ``input``."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of each element."""
        ctx.save_for_backward(input, target)
        return torch.ops.own_operator.mse_loss(input, target)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients of both arguments."""
        grad_input = torch.ops.own_operator.mse_loss_backward(grad_output, *ctx.saved_tensors)
        return grad_input, -grad_input


def check_values() -> None:
    """Compare losses and gradients with those of PyTorch on a CPU, also for a view that is not contiguous."""
    rows, target = torch.randn(6, 5), torch.randn(5, 6)
    input = rows.T.requires_grad_()
    expected = torch.nn.functional.mse_loss(input, target, reduction="none")
    [expected_grad] = torch.autograd.grad(expected.sum(), input)
    on_npu = rows.npu().T.requires_grad_()
    found = MseLoss.apply(on_npu, target.npu())
    [found_grad] = torch.autograd.grad(found.sum(), on_npu)
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(found_grad.cpu(), expected_grad)


def check_derivatives() -> None:
    """Compare the derivatives with finite differences of the loss.

    CANN's operators have no float64. But central differences of a square are exact for any step size, and large steps
    make up for float32.
    """
    input, target = (torch.randn(3, 4, device="npu", requires_grad=True) for _ in range(2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is not a double precision")
        gradcheck(MseLoss.apply, (input, target), eps=0.125, atol=1e-4, rtol=1e-4)


def refusal() -> str:
    """Return CANN's error for shapes that do not match."""
    try:
        MseLoss.apply(torch.ones(3, device="npu"), torch.ones(2, device="npu"))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    raise AssertionError("shapes that do not fit each other are accepted")


def check_that_nothing_is_left() -> None:
    """Check that all aclTensors and executors have been destroyed."""
    torch.npu.synchronize()
    deadline = time.monotonic() + 5  # torch_npu's queue releases a call shortly after the device has completed it
    while (alive := host_npu.stats().alive)["aclTensor"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive["aclTensor"] == alive["aclOpExecutor"] == 0, alive


def main() -> int:
    """Test the operators and return the exit status."""
    if not host_npu.is_enabled():
        print(f"error: it needs the host NPU: python -m host_npu {sys.argv[0]}", file=sys.stderr)
        return 2
    load()
    check_values()
    check_derivatives()
    print(f"refused: {refusal()}")
    check_that_nothing_is_left()
    launches = host_npu.stats().launches
    print(
        "Shown: an extension that knows torch_npu only has launched aclnnMseLoss"
        f" {launches['aclnnMseLoss']} times and aclnnMseLossBackward {launches['aclnnMseLossBackward']} times"
        " without an NPU.\nIts values are PyTorch's, its derivatives pass gradcheck, a wrong call is an exception with"
        " CANN's words, and nothing is left alive."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
