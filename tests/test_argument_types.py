"""Arguments of a wrong type of losses on a head and raw operators: the error names the argument and what it accepts."""

import torch_aclnn_ops
from torch_aclnn_ops import functional as ours
from torch_aclnn_ops import ops

import numpy as np
import pytest
import torch

_ROWS, _HEAD, _INDICES, _VALUES = torch.rand(8, 4), torch.rand(11, 4), torch.arange(8), torch.rand(3)

OPTIONAL = {"linear_bias": torch.rand(11), "weight": torch.rand(11), "token_weight": torch.rand(8)}
CALL = {"input": _ROWS, "linear_weight": _HEAD, "target": _INDICES, **OPTIONAL}
WRONG = {"None": None, "list": [1.0, 2.0], "array": np.ones((8, 4)), "int": 3, "float": 0.5, "str": "x"}
DESCRIBED = {"list": "of type list", "array": "of type ndarray"}


@pytest.mark.parametrize("argument", CALL)
@pytest.mark.parametrize("kind", WRONG)
def test_a_non_tensor_raises_with_the_arguments_name(argument, kind):
    if kind == "None" and argument in OPTIONAL:
        return
    with pytest.raises(TypeError) as caught:
        ours.linear_cross_entropy(**{**CALL, argument: WRONG[kind]})
    message, described = str(caught.value), DESCRIBED.get(kind, repr(WRONG[kind]))
    assert message.startswith(f"linear_cross_entropy: {argument} must be ") and "Tensor" in message
    assert described in message or argument == "token_weight"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ours.mse_loss(1.0, _VALUES), "mse_loss: input must be a Tensor, but it is 1.0"),
        (lambda: ours.mse_loss(_VALUES, None), "mse_loss: target must be a Tensor, but it is None"),
        (lambda: ours.mse_loss(_VALUES, _VALUES, weight="x"), "mse_loss: weight must be None or a Tensor, .* is 'x'"),
        (lambda: ours.binary_cross_entropy(_VALUES, [1]), "binary_cross_entropy: target must be .* of type list"),
        (lambda: ours.embedding(3, _HEAD), "embedding: input must be a Tensor, but it is 3"),
        (lambda: ours.embedding(_INDICES, None), "embedding: weight must be a Tensor, but it is None"),
        (lambda: ours.embedding(_INDICES, _HEAD, "a"), "embedding: padding_idx must be None or an int, .* is 'a'"),
    ],
)
def test_a_wrong_type_of_another_drop_in_raises_with_the_arguments_name(call, sentence):
    with pytest.raises(TypeError, match=f"^{sentence}$"):
        call()


@pytest.mark.parametrize("reduction", [None, 3, ["mean"], np.ones(2), "average", torch.ones(2)], ids=repr)
def test_an_invalid_reduction_raises_with_its_name_or_value(reduction):
    with pytest.raises((TypeError, ValueError), match="linear_cross_entropy: reduction") as caught:
        ours.linear_cross_entropy(**CALL, reduction=reduction)
    assert "ambiguous" not in str(caught.value)


RAW = {
    "mse_loss_backward": (_VALUES, _VALUES, _VALUES, 1),
    "binary_cross_entropy_backward": (_VALUES, _VALUES, _VALUES, _VALUES, 1),
    "embedding_dense_backward": (_ROWS, _INDICES, 8, 0, False),
    "fused_linear_online_max_sum": (_ROWS, _HEAD, _INDICES, 0, 11, False),
}
RAW_CASES = [(name, place, kind) for name, given in RAW.items() for place in range(len(given)) for kind in WRONG]


@pytest.mark.parametrize("name, place, kind", RAW_CASES)
def test_a_raw_operator_raises_for_an_argument_of_the_wrong_type_with_its_name(name, place, kind):
    operator, arguments = getattr(ops, name), list(RAW[name])
    is_number = not isinstance(arguments[place], torch.Tensor)
    argument = operator._names[place]
    if (is_number and kind == "int") or (argument, kind) == ("weight", "None") and name.startswith("binary"):
        return
    arguments[place] = WRONG[kind]
    described = DESCRIBED.get(kind, repr(WRONG[kind]))
    with pytest.raises(TypeError, match=f"^{name}: {argument} must be .*, but it is {described}$"):
        operator(*arguments)


def test_an_object_with_torch_function_is_passed_to_torch():
    class Lazy:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function.__name__

    assert ours.mse_loss(Lazy(), _VALUES) == "mse_loss"


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        ("functional", "gelu", "; use torch.nn.functional.gelu"),
        ("nn", "Linear", "; use torch.nn.Linear"),
        ("optim", "SGD", "; use torch.optim.SGD"),
        ("functional", "gleu", ""),
    ],
)
def test_a_name_that_only_torch_has_is_an_error_that_says_where(module, name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(getattr(torch_aclnn_ops, module), name)
    assert str(caught.value) == f"module 'torch_aclnn_ops.{module}' has no attribute {name!r}{hint}"
