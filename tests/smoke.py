"""Each operator once, forward and backward, and a step of the optimizer: ``python tests/smoke.py cpu``.

The shortest run that touches every part, for a machine or an emulation that is too slow for all tests. With ``npu``
every operator of CANN has to have been launched: ``python -m host_npu tests/smoke.py npu``.
"""

import inspect
import sys
from collections.abc import Callable

from torch_aclnn_ops import doctor, nn, ops
from torch_aclnn_ops import functional as ours
from torch_aclnn_ops._drop_ins import DROP_INS
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
import torch.nn.functional as F
from torch import Tensor

# A result is rounded once, or is a float32 sum of a few hundred terms.
# In bfloat16 three of at most 2**-8: of the logits' gradients, of their product, and of that times grad_output.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-8}
_CLASSES = 160


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _indices(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def _head() -> Tensor:
    # Logits of about 1: an operator that keeps them in 16 bits loses little.
    return _normal(_CLASSES, 24) / 24**0.5


def _linear_cross_entropy(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(input, weight), target)


_Function = Callable[..., Tensor]
_Make = Callable[[], list[Tensor]]

# Our function, torch's, the tensors to differentiate by, and what else they are called with.
_CALLS: dict[str, tuple[_Function, _Function, _Make, _Make]] = {
    "embedding": (
        lambda weight, indices: ours.embedding(indices, weight),
        lambda weight, indices: F.embedding(indices, weight),
        lambda: [_normal(50, 12)],
        lambda: [_indices(50, 9, 4)],
    ),
    "linear_cross_entropy": (
        ours.linear_cross_entropy,
        _linear_cross_entropy,
        lambda: [_normal(40, 24), _head()],
        lambda: [_indices(_CLASSES, 40)],
    ),
}
# Functions of an input, and losses of an input and a target of one shape. Probabilities do for all of them.
for _name in DROP_INS:
    _parameters = inspect.signature(getattr(ours, _name)).parameters.values()
    _needed = [parameter.name for parameter in _parameters if parameter.default is parameter.empty]
    if _needed in (["input"], ["input", "target"]):
        _CALLS[_name] = (
            getattr(ours, _name),
            getattr(F, _name),
            lambda: [_normal(7, 33).sigmoid()],
            lambda others=_needed[1:]: [_normal(7, 33).sigmoid() for _ in others],
        )


def _assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    actual, scale = actual.detach().cpu().double(), max(1e-3, expected.abs().max().item())
    error = (actual - expected).abs().max().item() / scale
    assert error <= _TOLERANCES[dtype], f"{what} is wrong by {error:.2e} of its largest element"


def _check_call(name: str, device: str, dtype: torch.dtype) -> None:
    function, reference, make, make_constants = _CALLS[name]
    constants = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in make_constants()]
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in make()]
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    result = function(*inputs, *(tensor.to(device) for tensor in constants))
    expected = reference(*exact, *(tensor.double() if tensor.is_floating_point() else tensor for tensor in constants))
    _assert_close(result, expected.detach(), dtype, name)
    grad = _normal(*expected.shape).to(dtype)
    result.backward(grad.to(device))
    expected.backward(grad.double())
    for index, (tensor, exactly) in enumerate(zip(inputs, exact, strict=True)):
        assert tensor.grad is not None and exactly.grad is not None
        _assert_close(tensor.grad, exactly.grad, dtype, f"the gradient of {name}'s tensor {index}")


def _check_shard(device: str) -> None:
    """The raw operators of the linear cross entropy, as a process that has all classes calls them."""
    input, weight = (tensor.to(torch.bfloat16) for tensor in (_normal(40, 24), _head()))
    target = _indices(_CLASSES, 40)
    on_device = [tensor.to(device) for tensor in (input, weight, target)]
    statistics = ops.fused_linear_online_max_sum(*on_device, 0, _CLASSES, True)
    logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits = statistics
    loss, softmax = ops.fused_cross_entropy_loss_with_max_sum(logits_max, sum_exp_logits, predicted_logits, logits)
    exact = [tensor.double().requires_grad_() for tensor in (input, weight)]
    exact_logits = F.linear(*exact)
    expected = F.cross_entropy(exact_logits, target, reduction="none")
    _assert_close(loss, expected.detach(), torch.bfloat16, "the loss of a shard")
    expected.sum().backward()
    grads = ops.fused_linear_cross_entropy_loss_grad(
        torch.ones(40, device=device), *on_device[:2], target_mask, masked_target, None, None, softmax
    )
    for grad, tensor in zip(grads, exact, strict=True):
        assert tensor.grad is not None
        _assert_close(grad, tensor.grad, torch.bfloat16, "a gradient of a shard")


def _check_optimizer(device: str) -> None:
    options = {"lr": 0.01, "weight_decay": 0.1}
    model = torch.nn.Linear(12, 3)
    reference = torch.nn.Linear(12, 3)
    reference.load_state_dict(model.state_dict())
    average = model.weight.detach().clone()
    model.to(device)
    optimizer = FusedEmaAdam(model.parameters(), ema_decay=0.9, **options)
    torch_optimizer = torch.optim.AdamW(reference.parameters(), **options)
    for _ in range(3):
        input, target = _normal(5, 12).float(), _normal(5, 3).float()
        for step, network, criterion, there in (
            (optimizer, model, nn.MSELoss(), device),
            (torch_optimizer, reference, torch.nn.MSELoss(), "cpu"),
        ):
            step.zero_grad()
            criterion(network(input.to(there)), target.to(there)).backward()
            step.step()
        average.lerp_(reference.weight.detach(), 0.1)
    _assert_close(model.weight, reference.weight.detach().double(), torch.float32, "a weight after three steps")
    with optimizer.swap_ema_params():
        _assert_close(model.weight, average.double(), torch.float32, "an average of weights")


def _check_launches() -> None:
    from torch_aclnn_ops import _extension, ops

    torch.npu.synchronize()
    launches = _extension.launches()
    missing = [name for name in (getattr(ops, operator).cann for operator in ops.__all__) if not launches.get(name)]
    assert not missing, f"{', '.join(missing)} not launched, but {launches}"


def main() -> None:
    """Run every check on the device that the command line names."""
    device = sys.argv[1]
    torch.manual_seed(0)
    print(doctor.describe())
    for name in _CALLS:
        for dtype in _TOLERANCES:
            _check_call(name, device, dtype)
            print(f"ok {name} {dtype}", flush=True)
    _check_shard(device)
    print("ok the raw operators of linear_cross_entropy")
    _check_optimizer(device)
    print("ok FusedEmaAdam")
    if device == "npu":
        _check_launches()
        print("ok every operator of CANN was launched")


if __name__ == "__main__":
    main()
