"""loss_function: the derivatives of a loss with respect to its target, by a loss of a test's own."""

from functools import partial

from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled
from torch_aclnn_ops.functional._loss_function import loss_function
from torch_aclnn_ops.functional._loss_function import reduce as reduce_losses

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.gradcheck import GradcheckError

from tests._contract import Case, DropInContract, Maker, assert_derivatives_are_right_or_raise, tables_of


def _soft_margin(input, target, reduction):
    return reduce_losses(torch.nn.functional.softplus(-target * input), reduction)


def _gradient(by, grad_output, input, target, reduction):
    """Differentiate by one of the tensors, of which ``by`` is the other."""
    gradient = -(target if by == "target" else input) * torch.sigmoid(-target * input) * grad_output
    return gradient / input.numel() if reduction == 1 else gradient


_of_input, _of_target = partial(_gradient, "target"), partial(_gradient, "input")
_make_loss = partial(loss_function, "SoftMarginLossFunction", _soft_margin, _of_input)


def _loss(**options):
    """Return the loss as drop-ins apply it."""
    return EagerOrCompiled(_make_loss(**options), _soft_margin)


_PAIR = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64), torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
_REFUSED = "SoftMarginLossFunction: there is no derivative with respect to target; detach it"


def _backward(loss, input, target):
    loss(input, target.requires_grad_(), 1).backward()


def _backward_by_the_input(loss, input, target):
    torch.autograd.grad(loss(input.requires_grad_(), target.requires_grad_(), 0).sum(), (input, target))


def _backward_of_backward(loss, input, target):
    value = loss(input.requires_grad_(), target.requires_grad_(), 1)
    torch.autograd.grad(torch.autograd.grad(value, input, create_graph=True)[0].sum(), target)


def _forward_mode(loss, input, target):
    with forward_ad.dual_level():
        loss(input, forward_ad.make_dual(target, torch.ones_like(target)), 1)


def _func_grad(loss, input, target):
    torch.func.grad(lambda t: loss(input, t, 1))(target)


def _vmap_of_grad(loss, input, target):
    torch.vmap(torch.func.grad(lambda t: loss(input, t, 2)))(target.expand(2, 3))


def _jvp(loss, input, target):
    torch.func.jvp(lambda t: loss(input, t, 1), (target,), (torch.ones_like(target),))


def _compiled(loss, input, target):
    torch.compile(lambda t: loss(input, t, 1), backend="aot_eager")(target.requires_grad_()).backward()


MODES = (
    _backward,
    _backward_by_the_input,
    _backward_of_backward,
    _forward_mode,
    _func_grad,
    _vmap_of_grad,
    _jvp,
    _compiled,
)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__.strip("_"))
def test_a_loss_without_grad_target_has_no_derivative_with_respect_to_its_target(mode):
    with pytest.raises(RuntimeError, match=_REFUSED):
        mode(_loss(), *(tensor.clone() for tensor in _PAIR))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__.strip("_"))
def test_a_loss_with_grad_target_has_one(mode):
    mode(_loss(grad_target=_of_target), *(tensor.clone() for tensor in _PAIR))


def test_a_loss_without_grad_target_has_every_derivative_with_respect_to_its_input():
    input, target = _PAIR
    loss = _loss()
    assert_derivatives_are_right_or_raise(lambda x: loss(x, target, 1), (input.clone().requires_grad_(),))
    found = torch.func.hessian(lambda x: loss(x, target, 2))(input)
    torch.testing.assert_close(found, torch.func.hessian(lambda x: _soft_margin(x, target, 2))(input))


def _contract_of(loss, is_constant):
    """Return what the contract tests of the loss: its target is an input of the table, or a constant."""
    make_target = lambda make: make.index(2, 3).to(make.dtype) * 2 - 1  # noqa: E731
    call = lambda F, input, target: loss(input, target, 1)  # noqa: E731
    if is_constant:
        return Case("loss", lambda make: (make.normal(3),), call, lambda make: (make_target(make),))
    return Case("loss", lambda make: (make.normal(3), make_target(make)), call)


WRONG = {"is_function_of_difference": True}, {"grad_target": lambda *args: 1.1 * _of_target(*args)}


@pytest.mark.parametrize("wrong", WRONG, ids=["negative of grad_input", "grad_target"])
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant target", "differentiable target"])
def test_the_contract_fails_where_the_derivative_with_respect_to_the_target_is_wrong(wrong, is_constant):
    case = _contract_of(_loss(**wrong), is_constant)
    promises = DropInContract()
    with pytest.raises(GradcheckError):
        promises.test_derivatives_with_respect_to_constants_are_right_or_raise(case)
        promises.test_first_derivatives_are_right(case)


def test_the_contract_passes_if_the_derivative_with_respect_to_a_constant_target_raises():
    DropInContract().test_derivatives_with_respect_to_constants_are_right_or_raise(_contract_of(_loss(), True))


def test_tables_differentiate_with_respect_to_some_constants():
    cases = [case for table in tables_of(DropInContract) for case in table.CASES]
    assert any(tensor.is_floating_point() for case in cases for tensor in case.constants(Maker(torch.float64)))
