"""The C++ autograd functions for eager CPU calls, compared with the Python functions that they replace.

With logging of implementations enabled, calls use the Python functions.
"""

import functools
import logging

from torch_aclnn_ops import _cpu_extension
from torch_aclnn_ops import functional as ours

import pytest
import torch
from torch._C._functorch import get_unwrapped

from tests._contract import HALF_DTYPES
from tests._modes import Calls, FunctionCalls

_VALUES = torch.tensor([[0.125, 0.5, 0.75, 1.0], [0.25, 0.625, 0.0, 0.375]])
_TARGET = torch.tensor([[0.25, 1.0, 0.0, 0.5], [0.75, 0.5, 0.25, 1.0]])
_INDICES = torch.tensor([[0, 1, 1], [1, 0, 1]])


def _weighted(input, target, **options):
    return ours.binary_cross_entropy(input, target, _TARGET.to(input), **options)


def _rows(weight, _, indices=_INDICES, **options):
    return ours.embedding(indices.to(weight.device), weight, **options)


# Each takes a tensor to train and a second tensor.
FUNCTIONS = {
    "mse_loss, none": functools.partial(ours.mse_loss, reduction="none"),
    "mse_loss, mean": ours.mse_loss,
    "mse_loss, sum": functools.partial(ours.mse_loss, reduction="sum"),
    "binary_cross_entropy, none": functools.partial(ours.binary_cross_entropy, reduction="none"),
    "binary_cross_entropy, mean": ours.binary_cross_entropy,
    "binary_cross_entropy, sum": functools.partial(ours.binary_cross_entropy, reduction="sum"),
    "binary_cross_entropy, weighted": _weighted,
    "embedding": _rows,
    "embedding, padding_idx": functools.partial(_rows, padding_idx=0),
    "embedding, scale_grad_by_freq": functools.partial(_rows, indices=_INDICES.int(), scale_grad_by_freq=True),
}
IN_16_BITS = [name for name in FUNCTIONS if not name.startswith("embedding")]
all_functions = pytest.mark.parametrize("name", FUNCTIONS)
each_need = pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)], ids=str)


@pytest.fixture
def listening(caplog):
    """Return a function that enables logging of implementations."""
    return lambda: caplog.set_level(logging.DEBUG, "torch_aclnn_ops")


def _is_native(output):
    return type(output.grad_fn).__name__ == "CppFunction"


def run(name, dtype=torch.float32, needs=(True, True), device="cpu"):
    """Return a function's output, and the gradients of both arguments."""
    values = (value.to(dtype).to(device, copy=True) for value in (_VALUES, _TARGET))
    arguments = [value.requires_grad_(need) for value, need in zip(values, needs, strict=True)]
    output = FUNCTIONS[name](*arguments)
    if output.requires_grad:
        output.backward(torch.arange(1.0, 1 + output.numel()).reshape(output.shape).to(output))
    return output, *(argument.grad for argument in arguments)


def _assert_same(results, expected):
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "name, dtype",
    [(name, dtype) for name in FUNCTIONS for dtype in (torch.float32, torch.float64)]
    + [(name, dtype) for name in IN_16_BITS for dtype in HALF_DTYPES],
)
@each_need
def test_an_eager_call_equals_the_python_function(name, dtype, needs, listening):
    native = run(name, dtype, needs)
    listening()
    in_python = run(name, dtype, needs)
    _assert_same(native, in_python)
    if native[0].requires_grad:
        assert _is_native(native[0]) and not _is_native(in_python[0])


def _of_many_dimensions(name):
    return FUNCTIONS[name](_VALUES.expand(*[1] * 7, 2, 4).clone().requires_grad_(), _TARGET.expand(*[1] * 7, 2, 4))


def _of_indices_of_many_dimensions(_):
    return ours.embedding(torch.zeros([1] * 8, dtype=torch.int64), _VALUES.clone().requires_grad_())


def _inside_a_mode(name):
    with Calls():
        return FUNCTIONS[name](_VALUES.clone().requires_grad_(), _TARGET)


def _of_a_dual_tensor(name):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(_VALUES.clone().requires_grad_(), _TARGET)
        return FUNCTIONS[name](dual, _TARGET)


def _after_its_transform(name):
    kept = []
    torch.func.grad(lambda value: kept.append(value) or value.sum())(_VALUES.clone())
    return FUNCTIONS[name](kept[0].requires_grad_(), _TARGET)


def _of_others_inside_a_transform(name):
    kept, argument = [], _VALUES.clone().requires_grad_()

    def function(value):
        kept.append(FUNCTIONS[name](argument, _TARGET))
        return (value * kept[0].sum()).sum()

    torch.func.grad(function)(_VALUES.clone())
    return get_unwrapped(kept[0])


OTHER_CALLS = (_inside_a_mode, _of_a_dual_tensor, _after_its_transform, _of_others_inside_a_transform)


@pytest.mark.parametrize(
    "call, name",
    [
        (_of_many_dimensions, "mse_loss, mean"),
        (_of_many_dimensions, "binary_cross_entropy, sum"),
        (_of_indices_of_many_dimensions, "embedding"),
        *((call, name) for call in OTHER_CALLS for name in FUNCTIONS),
    ],
)
def test_unsupported_calls_use_the_python_function(call, name):
    assert not _is_native(call(name))


@pytest.mark.parametrize("name", ["embedding", "embedding, padding_idx"])
def test_a_16_bit_table_uses_the_function_that_accumulates_in_float32(name):
    assert not _is_native(FUNCTIONS[name](_VALUES.bfloat16().requires_grad_(), None))


@pytest.mark.parametrize("name", IN_16_BITS)
def test_autocast_around_a_backward_pass_changes_nothing(name):
    gradients = []
    for enabled in (False, True):
        trained = _VALUES.bfloat16().requires_grad_()
        output = FUNCTIONS[name](trained, _TARGET.bfloat16() * 0.7).sum() * 0.3
        with torch.autocast("cpu", enabled=enabled):
            output.backward()
        gradients.append(trained.grad)
    _assert_same(gradients[:1], gradients[1:])


@pytest.mark.parametrize("name", ["mse_loss, mean", "binary_cross_entropy, mean", "embedding"])
def test_a_mode_sees_the_raw_operator_of_a_backward_pass(name):
    output = FUNCTIONS[name](_VALUES.clone().requires_grad_(), _TARGET)
    assert _is_native(output)
    with Calls() as calls:
        output.sum().backward()
    assert any(operator.namespace == "torch_aclnn_ops" for operator in calls.operators)


def test_arguments_modified_before_the_backward_pass_raise():
    input, target = _VALUES.clone().requires_grad_(), _TARGET.clone()
    loss = ours.mse_loss(input, target)
    target.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@all_functions
def test_without_the_extension_the_python_function_is_used(name, monkeypatch):
    native = run(name)
    monkeypatch.setattr(_cpu_extension, "why_unavailable", lambda: "it was not built")
    for module in (ours.mse_loss, ours.binary_cross_entropy, ours.embedding):
        function = module.__globals__[f"_{module.__name__}"]
        monkeypatch.setattr(function, "_entries", {})
    in_python = run(name)
    assert not _is_native(in_python[0])
    _assert_same(native, in_python)


@pytest.fixture(params=[True, False], ids=["in C++", "in Python"])
def _is_built(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(_cpu_extension, "why_unavailable", lambda: "it was not built")


in_both_languages = pytest.mark.usefixtures("_is_built")
MOVES = {
    "address": lambda tensor: tensor.clone(),
    "dtype": lambda tensor: tensor.view(torch.bfloat16),
    "shape": lambda tensor: tensor.view(4, 4),
    "fewer elements": lambda tensor: tensor[:, :7],
    "strides": lambda tensor: tensor.as_strided((2, 8), (1, 2)),
}


@in_both_languages
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_where_tensors_lie_differs_if_one_of_them_changes(move):
    tensors = [torch.zeros(3), torch.zeros(2, 8).half(), torch.zeros(())]
    before = _cpu_extension.placement(tensors)
    assert _cpu_extension.placement(list(tensors)) == before
    assert _cpu_extension.placement([tensors[0], move(tensors[1]), tensors[2]]) != before
    assert _cpu_extension.placement(tensors[::-1]) != before


_A, _B, _C = torch.zeros(1), torch.zeros(1), torch.zeros(1)
_ITEMS = ["a", _A, "b", _B]
# Containers, the objects that they are compared with, and whether they hold these.
COMPARED = {
    "a list": ([[_A, _B]], [_A, _B], True),
    "two": ([[_A], [_B]], [_A, _B], True),
    "a tuple": ([(_A, _B)], [_A, _B], True),
    "another order": ([[_B, _A]], [_A, _B], False),
    "an equal tensor": ([[_A, _C]], [_A, _B], False),
    "fewer": ([[_A]], [_A, _B], False),
    "more": ([[_A, _B], [_C]], [_A, _B], False),
    "none": ([], [_A, _B], False),
    "these items": ([{"a": _A}, {"b": _B}], _ITEMS, True),
    "in one dict": ([{"a": _A, "b": _B}], _ITEMS, True),
    "other keys": ([{"b": _A}, {"a": _B}], _ITEMS, False),
    "other values": ([{"a": _B}, {"b": _A}], _ITEMS, False),
    "fewer items": ([{"a": _A}], _ITEMS, False),
    "items and a list": ([{"a": _A}, ["b", _B]], _ITEMS, True),
    "more items": ([{"a": _A}, {"b": _B}, {"c": _C}], _ITEMS, False),
}


@in_both_languages
@pytest.mark.parametrize("containers, wanted, expected", COMPARED.values(), ids=COMPARED)
def test_what_containers_hold_is_compared_by_identity(containers, wanted, expected):
    assert _cpu_extension.holds(containers, wanted) is expected


@in_both_languages
def test_gradients_are_compared_by_identity():
    tensors, grads = [torch.zeros(2) for _ in range(2)], [torch.ones(2) for _ in range(2)]
    assert not _cpu_extension.have_grads(tensors, grads)
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad
    assert _cpu_extension.have_grads(tensors, grads)
    assert not _cpu_extension.have_grads(tensors, grads[:1])
    assert not _cpu_extension.have_grads(tensors, grads[::-1])
    tensors[1].grad = grads[1].clone()
    assert not _cpu_extension.have_grads(tensors, grads)


_ROWS, _HEAD, _CLASSES = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([4, 0, 2])


@pytest.fixture
def in_cpp(monkeypatch):
    """Return a list that records, for every call with few logits, whether C++ computes it."""
    taken, entry = [], _cpu_extension.few_logits
    monkeypatch.setattr(
        _cpu_extension,
        "few_logits",
        lambda *arguments: taken.append(entry(*arguments) is not None) or entry(*arguments),
    )
    return taken


PLAIN_CALLS = {
    "the defaults": {},
    "a bias": {"linear_bias": torch.randn(5, requires_grad=True)},
    "a sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "label smoothing": {"label_smoothing": 0.25},
    "an ignored class of no row": {"ignore_index": 3},
    "a view": {"target": torch.tensor([4, 1, 0, 1, 2])[::2]},
}


@pytest.mark.parametrize("options", PLAIN_CALLS.values(), ids=PLAIN_CALLS)
def test_the_loss_of_few_logits_in_cpp_equals_that_in_python(options, in_cpp, listening):
    def results():
        arguments = {"input": _ROWS.clone().requires_grad_(), "linear_weight": _HEAD.clone().requires_grad_()}
        loss = ours.linear_cross_entropy(**arguments, **{"target": _CLASSES, **options})
        trained = [*arguments.values(), *(one for name, one in options.items() if name == "linear_bias")]
        return [loss, *torch.autograd.grad(loss.sum(), trained)]

    native = results()
    assert in_cpp == [True]
    listening()
    _assert_same(native, results())
    assert in_cpp == [True]


def _in(mode):
    def call(*arguments):
        with mode():
            return ours.linear_cross_entropy(*arguments)

    return call


_COLUMN = torch.tensor([[0, 0], [1, 0], [4, 0]])[:, 0]


def _in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


OTHER_CALLS = {
    "float64": lambda x, w, t: ours.linear_cross_entropy(x.double(), w.double(), t),
    "bfloat16": lambda x, w, t: ours.linear_cross_entropy(x.bfloat16(), w.bfloat16(), t),
    "a batch": lambda x, w, t: ours.linear_cross_entropy(x[None], w, t[None]),
    "one row": lambda x, w, t: ours.linear_cross_entropy(x[0], w, t[0]),
    "uint8": lambda x, w, t: ours.linear_cross_entropy(x, w, t.byte()),
    "probabilities": lambda x, w, t: ours.linear_cross_entropy(x, w, torch.full((3, 5), 0.2)),
    "an ignored row": lambda x, w, t: ours.linear_cross_entropy(x, w, t, ignore_index=4),
    "an ignored row of a column": lambda x, w, t: ours.linear_cross_entropy(x, w, _COLUMN, ignore_index=4),
    "inference mode's": lambda x, w, t: ours.linear_cross_entropy(x.requires_grad_(), w, _in_inference_mode(t)),
    "no rows": lambda x, w, t: ours.linear_cross_entropy(x[:0], w, t[:0]),
    "a head of an operator": lambda x, w, t: ours.linear_cross_entropy(x, w.requires_grad_() * 1, t),
    "many logits": lambda x, w, t: ours.linear_cross_entropy(x, w.repeat(350_000, 1), t),
    "a number that is no float": lambda x, w, t: ours.linear_cross_entropy(x, w, t, label_smoothing=0),
    "autocast": _in(lambda: torch.autocast("cpu")),
    "a dispatch mode": _in(Calls),
    "vmap": torch.vmap(ours.linear_cross_entropy, (0, None, None)),
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_cpp_leaves_other_calls_to_python(call, in_cpp):
    input = _ROWS.expand(2, 3, 4) if call is OTHER_CALLS["vmap"] else _ROWS
    call(input.clone(), _HEAD.clone(), _CLASSES)
    assert True not in in_cpp


def test_a_function_mode_sees_torchs_functions_of_few_logits(in_cpp):
    with FunctionCalls() as calls:
        ours.linear_cross_entropy(_ROWS, _HEAD, _CLASSES)
    assert {torch.nn.functional.linear, torch.nn.functional.cross_entropy} <= set(calls.functions)
    assert in_cpp == [False]
