"""disabled: drop-ins, modules and patched functions are torch's own, for the whole process or temporarily."""

import inspect
import threading
from contextlib import nullcontext
from functools import partial

from torch_aclnn_ops import _switch, disabled, doctor, explain, functional, nn, patch, report
from torch_aclnn_ops._checks import DROP_INS
from torch_aclnn_ops._switch import is_disabled

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from tests.test_nn import MODULES

INPUT = torch.rand(4, 3, requires_grad=True)
CLASSES = torch.tensor([0, 1, 2, 1])
NAMES = [name for name in DROP_INS if hasattr(F, name)]
_NAMED = {"linear_weight": INPUT, "weight": INPUT, "target": torch.rand(4, 3)}
_OF = {"embedding": {"input": CLASSES}, "linear_cross_entropy": {"target": CLASSES}}


def _arguments(name):
    """Return the arguments of a drop-in that have no default."""
    given = {"input": INPUT, **_NAMED, **_OF.get(name, {})}
    parameters = inspect.signature(DROP_INS[name]).parameters.values()
    return [given[parameter.name] for parameter in parameters if parameter.default is parameter.empty]


def _node(result):
    return type(result.grad_fn).__name__


@pytest.mark.parametrize("name", NAMES)
def test_a_drop_in_calls_torchs_function(name):
    arguments = _arguments(name)
    expected = getattr(F, name)(*arguments)
    with disabled():
        result = getattr(functional, name)(*arguments)
    assert _node(result) == _node(expected)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", [name for name in nn.__all__ if hasattr(torch.nn, name)])
def test_a_module_computes_what_torchs_module_does(name):
    _, options, inputs = next(module for module in MODULES if module[0] == name)
    torch.manual_seed(0)
    expected = getattr(torch.nn, name)(**options)(*inputs)
    torch.manual_seed(0)
    with disabled():
        result = getattr(nn, name)(**options)(*inputs)
    assert _node(result) == _node(expected)
    assert torch.equal(result, expected)


def test_patched_functions_are_torchs():
    with patch(), disabled():
        assert _node(F.mse_loss(INPUT, INPUT.detach())) == "MseLossBackward0"


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"outputs": ("entropy",)}])
def test_arguments_that_torchs_function_lacks_work_as_before(options):
    expected = functional.linear_cross_entropy(INPUT, INPUT, CLASSES, **options)
    with disabled():
        result = functional.linear_cross_entropy(INPUT, INPUT, CLASSES, **options)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


HIDDEN, HEAD = torch.rand(2, 3, 4, dtype=torch.bfloat16), torch.rand(5, 4, dtype=torch.bfloat16)
LABELS = torch.tensor([[0, 4, 1], [2, 3, -100]])
ROWS_OF_LABELS = {0: LABELS, 1: torch.tensor([[4, 1, -100], [3, -100, -100]])}


@pytest.mark.parametrize("shift", ROWS_OF_LABELS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batches_and_shifted_labels_are_computed_by_torch(reduction, shift):
    hidden = HIDDEN.clone().requires_grad_()
    logits, rows = torch.nn.functional.linear(HIDDEN, HEAD), ROWS_OF_LABELS[shift]
    expected = F.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction=reduction)
    with disabled(), report() as counts:
        result = functional.linear_cross_entropy(hidden, HEAD, LABELS, shift=shift, reduction=reduction)
    if reduction == "none":
        expected = expected.view(2, 3).roll(shift, -1)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    assert hidden.grad.shape == hidden.shape
    [reason] = counts.as_dict()["operators"]["linear_cross_entropy"]["reasons"]
    assert (reason["implementation"], reason["reason"]) == ("torch", "torch_aclnn_ops is disabled")


def test_probabilities_of_a_batch_are_computed_by_torch():
    target = torch.rand(2, 3, 5)
    expected = F.cross_entropy((HIDDEN.float() @ HEAD.float().T).flatten(0, 1), target.flatten(0, 1))
    with disabled():
        result = functional.linear_cross_entropy(HIDDEN.float(), HEAD.float(), target)
    torch.testing.assert_close(result, expected)


def test_explain_says_that_the_package_is_disabled():
    with disabled():
        text = explain(functional.linear_cross_entropy, HIDDEN, HEAD, LABELS, shift=True)
    assert text == "linear_cross_entropy: native PyTorch kernel, because torch_aclnn_ops is disabled"


def test_the_doctor_says_that_the_package_is_disabled_and_how_to_enable_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check", lambda _: [])
    for is_off in (False, True):
        with disabled() if is_off else nullcontext():
            assert doctor.describe().startswith("torch_aclnn_ops is disabled; unset TORCH_ACLNN_DISABLED") == is_off
            assert doctor.findings()[0].found.endswith("disabled") == is_off
            doctor.main(["--check", "--device", "cpu"])
        assert ("torch_aclnn_ops is disabled" in capsys.readouterr().err) == is_off


def test_a_wrong_argument_raises_the_error_of_torch():
    # torch before 2.13 has no such function; linear and cross_entropy replace it.
    sentence = "last dimensions" if hasattr(F, "linear_cross_entropy") else "cannot be multiplied"
    with disabled(), pytest.raises(RuntimeError, match=sentence):
        functional.linear_cross_entropy(INPUT, INPUT[:, :2], CLASSES)


def test_it_ends_with_the_last_of_several_and_after_an_error():
    with disabled():
        with pytest.raises(ZeroDivisionError), disabled():
            raise ZeroDivisionError
        assert is_disabled()
    assert not is_disabled()


def test_start_and_stop_hold_for_other_threads():
    switch = disabled().start()
    try:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(is_disabled()))
        thread.start()
        thread.join()
    finally:
        switch.stop()
    assert seen == [True]
    switch.stop()
    assert not is_disabled()


def test_it_decorates_a_function():
    assert disabled()(is_disabled)()
    assert not is_disabled()


def test_an_environment_variable_decides_for_a_process(monkeypatch):
    for value, number in (("0", 0), ("1", 1)):
        monkeypatch.setenv("TORCH_ACLNN_DISABLED", value)
        assert _switch._initial() == number
    monkeypatch.setenv("TORCH_ACLNN_DISABLED", "yes")
    with pytest.raises(ValueError, match="^TORCH_ACLNN_DISABLED must be 0 or 1, but it is 'yes'$"):
        _switch._initial()


COMPILED = {
    **{name: (getattr(functional, name), _arguments(name)) for name in DROP_INS},
    "shifted labels": (partial(functional.linear_cross_entropy, shift=True), (HIDDEN, HEAD, LABELS)),
    "probabilities of a batch": (functional.linear_cross_entropy, (HIDDEN, HEAD, torch.rand(2, 3, 5).bfloat16())),
    "softcap": (partial(functional.linear_cross_entropy, softcap=2.0), (INPUT, INPUT, CLASSES)),
    "linear_kl_div": (functional.linear_kl_div, (INPUT, INPUT, INPUT.detach(), INPUT.detach())),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.every_nth_case(3)
def test_a_call_is_compiled_in_one_graph_while_the_package_is_disabled(name, backend):
    function, arguments = COMPILED[name]
    with disabled():
        expected = function(*arguments)
        result = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
        torch.testing.assert_close(result, expected)
        if expected.requires_grad:
            gradients = [torch.autograd.grad(loss.sum(), INPUT)[0] for loss in (result, expected)]
            torch.testing.assert_close(*gradients)


def test_compiled_code_is_compiled_once_for_each_state_of_the_switch():
    compiled = CompileCounterWithBackend("eager")
    loss = torch.compile(lambda x: functional.mse_loss(x, x.detach() + 1), backend=compiled, fullgraph=True)
    for _ in range(3):
        assert _node(loss(INPUT)) != "MseLossBackward0"
        with disabled():
            assert _node(loss(INPUT)) == "MseLossBackward0"
    assert compiled.frame_count == 2
