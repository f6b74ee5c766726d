"""loss_function: the derivatives of a loss with respect to its target, by a loss of a test's own."""

from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled
from torch_aclnn_ops.functional._loss_function import loss_function
from torch_aclnn_ops.functional._loss_function import reduce as reduce_losses

import pytest
import torch
from torch.autograd import forward_ad

from tests._contract import assert_derivatives_are_right_or_raise


def _soft_margin(input, target, reduction):
    return reduce_losses(torch.nn.functional.softplus(-target * input), reduction)


def _grad_input(grad_output, input, target, reduction):
    gradient = -target * torch.sigmoid(-target * input) * grad_output
    return gradient / input.numel() if reduction == 1 else gradient


# As drop-ins apply it.
_LOSS = EagerOrCompiled(loss_function("SoftMarginLossFunction", _soft_margin, _grad_input), _soft_margin)
_PAIR = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64), torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
_REFUSED = "SoftMarginLossFunction: there is no derivative with respect to target; detach it"


def _forward_mode(loss, input, target):
    with forward_ad.dual_level():
        loss(input, forward_ad.make_dual(target, torch.ones_like(target)), 1)


def _backward_of_backward(loss, input, target):
    value = loss(input.requires_grad_(), target.requires_grad_(), 1)
    torch.autograd.grad(torch.autograd.grad(value, input, create_graph=True)[0].sum(), target)


def _compiled(loss, input, target):
    torch.compile(lambda t: loss(input, t, 1), backend="aot_eager")(target.requires_grad_()).backward()


# Ways to a derivative by the target, of a loss, an input and a target.
MODES = {
    "backward": lambda loss, x, t: loss(x, t.requires_grad_(), 1).backward(),
    "by both": lambda loss, x, t: torch.autograd.grad(loss(x.requires_grad_(), t.requires_grad_(), 0).sum(), (x, t)),
    "backward of backward": _backward_of_backward,
    "forward mode": _forward_mode,
    "func.grad": lambda loss, x, t: torch.func.grad(lambda t: loss(x, t, 1))(t),
    "vmap of grad": lambda loss, x, t: torch.vmap(torch.func.grad(lambda t: loss(x, t, 2)))(t.expand(2, 3)),
    "jvp": lambda loss, x, t: torch.func.jvp(lambda t: loss(x, t, 1), (t,), (torch.ones_like(t),)),
    "compiled": _compiled,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_loss_without_grad_target_has_no_derivative_with_respect_to_its_target(mode):
    with pytest.raises(RuntimeError, match=_REFUSED):
        mode(_LOSS, *(tensor.clone() for tensor in _PAIR))


def test_a_loss_without_grad_target_has_every_derivative_with_respect_to_its_input():
    input, target = _PAIR
    loss = _LOSS
    assert_derivatives_are_right_or_raise(lambda x: loss(x, target, 1), (input.clone().requires_grad_(),))
    found = torch.func.hessian(lambda x: loss(x, target, 2))(input)
    torch.testing.assert_close(found, torch.func.hessian(lambda x: _soft_margin(x, target, 2))(input))
