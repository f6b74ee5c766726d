"""Invalid arguments of losses on a head and other drop-ins: the error names the argument and what it accepts."""

import math
import re

import torch_aclnn_ops
from torch_aclnn_ops import functional as ours

import numpy as np
import pytest
import torch
from hypothesis import given

from tests._raw_operator import NO_TENSORS
from tests.test_linear_cross_entropy import calls

_ROWS, _HEAD, _INDICES, _VALUES = torch.rand(8, 4), torch.rand(11, 4), torch.arange(8), torch.rand(3)

OPTIONAL = {"linear_bias": torch.rand(11), "weight": torch.rand(11), "token_weight": torch.rand(8)}
CALL = {"input": _ROWS, "linear_weight": _HEAD, "target": _INDICES, **OPTIONAL}


@pytest.mark.parametrize("argument", CALL)
@pytest.mark.parametrize("described", NO_TENSORS)
def test_a_non_tensor_raises_with_the_arguments_name(argument, described):
    if described == "None" and argument in OPTIONAL:
        return
    with pytest.raises(TypeError) as caught:
        ours.linear_cross_entropy(**{**CALL, argument: NO_TENSORS[described]})
    message = str(caught.value)
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


_SOFT, _UNSHIFTED = torch.full((2, 3, 6), 0.1), "be 0 unless target has the class indices of sequences, but it"
_POSITIONS = {"input": torch.rand(5, 2), "linear_weight": torch.rand(6, 3, 2), "target": torch.zeros(5, 3).long()}
_LEFT = "not be given with arguments that are left to torch's function: tensor subclasses, sparse tensors and heads of"


class _Traced:
    """A stand-in for the proxies of ``torch.fx.symbolic_trace``."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return cls()

    def flatten(self, *_):
        return self


# Invalid arguments for an input of shape (2, 3, 2) and 6 classes, the exception, and its text after "must".
WRONG = [
    ({"linear_bias": torch.ones(6).double()}, RuntimeError, "have dtype torch.float32, as input"),
    ({"weight": torch.ones(6).double()}, RuntimeError, "have dtype torch.float32, but it has torch.f"),
    ({"linear_bias": torch.ones(6, device="meta")}, RuntimeError, "be on cpu, as input is, but "),
    ({"softcap": 0}, ValueError, "be positive and finite, but it is 0"),
    ({"softcap": "high"}, TypeError, "be None or a number, but it is 'high'"),
    ({"temperature": -1.0}, ValueError, "be positive and finite, but it is -1.0"),
    ({"temperature": None}, TypeError, "be a number, but it is None"),
    ({"temperature": torch.ones(2)}, TypeError, r"be a number, but it is a tensor of shape \[2\]"),
    ({"softcap": np.ones(2)}, TypeError, r"be None or a number, but it is array"),
    ({"chunk_size": 0}, ValueError, "be at least 1, but it is 0"),
    ({"chunk_size": True}, TypeError, 'be "auto" or an int, but it is True'),
    ({"options": {}}, TypeError, "(be None or a LinearCrossEntropyOptions, but it is )?{}"),
    ({"zero_if_all_ignored": "no"}, TypeError, "be a bool, but it is 'no'"),
    ({"chunk_size": np.ones(2)}, TypeError, 'be "auto" or an int, but it is array'),
    ({"lse_square_scale": -1e-4}, ValueError, "be at least 0 and finite, but it is -0.0001"),
    ({"outputs": "entropy"}, TypeError, "be a tuple of names, but it is 'entropy'"),
    ({"outputs": ("logits",)}, ValueError, "be among log_probabilities, .*, but one is 'logits'"),
    ({"max_memory": 10}, ValueError, "be at least 24 bytes for these arguments, but it is 10"),
    ({"max_memory": 1.5}, TypeError, "be None or an int, but it is 1.5"),
    ({"chunk_size": 4, "max_memory": 99}, ValueError, "not both be given"),
    ({"token_weight": torch.ones(4)}, ValueError, r"have the shape of class indices, \[2, 3\], but"),
    ({"token_weight": torch.ones(2, 3).long()}, TypeError, "have a floating-point dtype, but it"),
    ({"shift": 1.0}, TypeError, "be a bool or an int, but it is 1.0"),
    ({"shift": -1}, ValueError, "be at least 0 and at most the 3 labels of a sequence, .* it is -1"),
    ({"shift": 4}, ValueError, "be at least 0 and at most the 3 labels of a sequence, .* it is 4"),
    ({"input": torch.ones(2, 3, 2, dtype=torch.int64)}, RuntimeError, "have a floating-point dtype, .*torch.int64"),
    ({"linear_weight": torch.ones(6, 3)}, RuntimeError, r"have shape \(C, 2\), but it has shape \[6, 3\]"),
    ({"linear_weight": torch.ones(6, 2, 2)}, RuntimeError, r"have shape \(C, 2\), but it has shape \[6, 2, 2\]"),
    ({"linear_weight": torch.ones(2)}, RuntimeError, r"have shape \(C, 2\), but it has shape \[2\]"),
    ({"linear_weight": torch.ones(0, 2)}, RuntimeError, "have at least one class, but it has shape"),
    ({"linear_weight": torch.ones(6, 2).double()}, RuntimeError, "have dtype torch.float32, as input has, but .*64"),
    ({"linear_weight": torch.ones(6, 2, device="meta")}, RuntimeError, "be on cpu, as input is, but it is on meta"),
    ({"target": torch.zeros(6, dtype=torch.int64)}, ValueError, r"have shape \[2, 3\] or .*, but it has shape \[6\]"),
    ({"target": torch.zeros(2, 3)}, RuntimeError, "have dtype torch.int64 or torch.uint8, .* has torch.float32"),
    ({"target": torch.zeros(2, 3).int()}, RuntimeError, "have dtype torch.int64 or torch.uint8, .* has torch.int32"),
    ({"target": torch.zeros(2, 3, device="meta").long()}, RuntimeError, "be on cpu, as input is, but it is on meta"),
    ({"target": torch.zeros(2, 3, 6).long()}, RuntimeError, "have a floating-point dtype, .*, but it has torch.int64"),
    ({"linear_bias": torch.ones(7)}, RuntimeError, r"have shape \[6\], but it has shape \[7\]"),
    ({"weight": torch.ones(7)}, RuntimeError, r"have shape \[6\], but it has shape \[7\]"),
    ({"weight": torch.ones(6).requires_grad_()}, RuntimeError, "not require grad with class indices as target"),
    ({"label_smoothing": 1.5}, RuntimeError, "be a number from 0 to 1, but it is 1.5"),
    ({"label_smoothing": "0.1"}, TypeError, "be a number from 0 to 1, but it is '0.1'"),
    ({"label_smoothing": np.ones(2)}, TypeError, "be a number from 0 to 1, but it is .*array"),
    ({"ignore_index": 1.5}, TypeError, "be None or an int, but it is 1.5"),
    ({"ignore_index": np.ones(2)}, TypeError, "be None or an int, but it is .*array"),
    ({"ignore_index": 1, "target": _SOFT}, RuntimeError, "be None with probabilities as target"),
    *(
        ({"outputs": (name,), "target": _SOFT}, ValueError, f"not have {name} with probabilities")
        for name in ("log_probabilities", "token_accuracy")
    ),
    ({"shift": True, "target": _SOFT}, ValueError, _UNSHIFTED),
    ({"shift": True, **_POSITIONS}, ValueError, _UNSHIFTED),
    *(
        ({"target": other, "shift": True}, TypeError, "be a Tensor if shift is given, but")
        for other in (None, _Traced())
    ),
    ({"softcap": 2.0, "linear_weight": torch.ones(6, 2).to_sparse()}, TypeError, _LEFT),
    ({"token_weight": torch.ones(2), **_POSITIONS}, TypeError, _LEFT),
    (
        {"linear_weight": torch.ones(6, 2), "input": torch.ones(2, 3, 6)},
        RuntimeError,
        ".*; pass hidden states, not logits, as input, and linear_weight with shape",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "sentence"), WRONG, ids=[sentence for *_, sentence in WRONG])
def test_a_wrong_argument_of_a_cross_entropy_is_named(wrong, error, sentence):
    arguments = {"input": torch.ones(2, 3, 2), "linear_weight": torch.ones(6, 2), "target": torch.zeros(2, 3).long()}
    ours.linear_cross_entropy(**arguments)
    named = f"{next(iter(wrong))}( and max_memory)?(=| must )"  # torch before 2.13 has no options
    with pytest.raises(error, match=f"^linear_cross_entropy: {named}{sentence}"):
        ours.linear_cross_entropy(**{**arguments, **wrong})


@given(call=calls(batches=[(2, 3), (1, 2, 2)], positions=[()]))
def test_every_error_of_a_batched_call_names_one_argument(call):
    input, head, target, options, _ = call
    try:
        ours.linear_cross_entropy(input, head, target, **options)
    except IndexError:
        pass  # a target that is not a class, with torch's message
    except (TypeError, ValueError, RuntimeError) as error:
        assert re.match("linear_cross_entropy: [a-z_]+ must ", str(error)), error


@pytest.mark.parametrize("reduction", [None, 3, ["mean"], np.ones(2), "average", torch.ones(2)], ids=repr)
def test_an_invalid_reduction_raises_with_its_name_or_value(reduction):
    with pytest.raises((TypeError, ValueError), match="linear_cross_entropy: reduction") as caught:
        ours.linear_cross_entropy(**CALL, reduction=reduction)
    assert "ambiguous" not in str(caught.value)


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


X, W, T, H = torch.ones(3, 2), torch.ones(4, 2), torch.ones(3, 5), torch.ones(4, 5)
ZEROS, TOP = torch.zeros(3, dtype=torch.int64), (torch.tensor([[0, 1]] * 3), torch.full((3, 2), -1.0))


def _taught(**changes):
    return {"input": X, "linear_weight": W, "teacher_input": T, "teacher_weight": H, **changes}


def _top(indices, values=TOP[1]):
    return {"input": X, "linear_weight": W, "teacher_top_k": (indices, values)}


REFUSALS = [
    (_taught(divergence="kl"), ValueError, "divergence must be one of 'forward_kl', .*'kl'"),
    (_taught(reduction="batchmean"), ValueError, "reduction must be one of 'none', 'mean', 'sum'"),
    (_taught(beta=-0.1), ValueError, "beta must be at least 0 and at most 1, but it is -0.1"),
    (_taught(beta=math.nan), ValueError, "beta must be at least 0 and at most 1, but it is nan"),
    (_taught(beta="x"), TypeError, "beta must be a number, but it is 'x'"),
    (_taught(beta=0.0), ValueError, "beta must be 0.5, the default, with divergence='forward_kl', but it is 0.0"),
    (_taught(vocab_size=5), ValueError, "vocab_size must be at most the 4 classes of every head, but it is 5"),
    (_taught(vocab_size=0), ValueError, "vocab_size must be at least 1, but it is 0"),
    (_taught(vocab_size=2.0), TypeError, "vocab_size must be an int, but it is 2.0"),
    (_taught(vocab_size=3, process_group=0), ValueError, "vocab_size must be None with process_group, but it is 3"),
    (_taught(ignore_index=0), ValueError, "ignore_index must be -100, .*is 0"),
    (_taught(temperature=0), ValueError, "temperature must be positive and finite"),
    (_taught(chunk_size=0), ValueError, "chunk_size must be at least 1"),
    (_taught(chunk_size=1, max_memory=9), ValueError, "chunk_size and max_memory must not both be"),
    ({"input": X, "linear_weight": W}, TypeError, "one of teacher_input and .* must be given, but none are"),
    (_taught(teacher_probs=X), TypeError, "one of teacher_input .* must be given, but 2 are"),
    (_taught(teacher_weight=None), TypeError, "teacher_weight must be a plain tensor, but it is None"),
    (_taught(input=[1.0]), TypeError, "input must be a plain tensor, but it is of type list"),
    (_taught(linear_weight=W.long()), TypeError, "linear_weight must have a floating-point dtype"),
    (_taught(input=X.to_sparse()), TypeError, "input must have a floating-point dtype and be strided"),
    (_taught(linear_weight=W.double()), TypeError, "linear_weight must have dtype torch.float32, as"),
    (_taught(teacher_weight=H.double()), TypeError, "teacher_weight must have dtype"),
    (_taught(linear_weight=H), ValueError, r"linear_weight must have shape \(V, 2\)"),
    (_taught(linear_bias=torch.ones(3)), ValueError, r"linear_bias must have shape \[4\]"),
    (_taught(linear_weight=W[:0]), ValueError, "linear_weight must have at least one class"),
    (_taught(teacher_input=T[:2]), ValueError, r"teacher_input must have the shape of input, \[3\], before its feat"),
    (_taught(teacher_weight=H[:3]), ValueError, "teacher_weight must have 4 classes, .* it has 3"),
    (_taught(teacher_bias=torch.ones(3)), ValueError, r"teacher_bias must have shape \[4\]"),
    ({"input": X, "linear_weight": W, "teacher_probs": X}, ValueError, r"teacher_probs must have shape \[3, 4\]"),
    ({"input": X, "linear_weight": W, "teacher_top_k": X}, TypeError, "teacher_top_k must be a pair of tensors"),
    (_top(X), TypeError, r"teacher_top_k\[0\] must have dtype"),
    (_top(TOP[0], X[:, :1]), ValueError, r"teacher_top_k\[1\] must"),
    (_top(TOP[0] + 3), IndexError, r"teacher_top_k\[0\] must have classes from 0 to 3, but it has the row \[3, 4\]"),
    (_top(TOP[0] * 0), ValueError, r"teacher_top_k\[0\] must have each class of a row once, but it has .*\[0, 0\]"),
    (_taught(target=torch.ones(3)), ValueError, "target must have dtype torch.int64 or torch.uint8"),
    (_taught(target=ZEROS[:2]), ValueError, r"target must have shape \[3\]"),
    (_taught(ignore_index=None), TypeError, "ignore_index must be an int, but it is None"),
    (_taught(shift=True), ValueError, "shift must be 0 without target, but it is True"),
    (_taught(shift=4, target=ZEROS), ValueError, "shift must be at least 0"),
    (_taught(hard_weight=0.7), ValueError, "hard_weight must be 0 without target, but it is 0.7"),
    (_taught(target=ZEROS, hard_weight=-1.0), ValueError, "hard_weight must be at least 0 and finite, but it is -1"),
    (_taught(target=ZEROS, hard_weight=True), TypeError, "hard_weight must be a number, but it is True"),
    (_taught(token_weight=torch.ones(2)), ValueError, "token_weight must have the shape of class"),
    (_taught(zero_if_all_ignored=0), TypeError, "zero_if_all_ignored must be a bool, but"),
    (_taught(vocab_sizes=(4,)), ValueError, "vocab_sizes must be None if process_group is None"),
    (_taught(process_group="gloo"), TypeError, "process_group must be None or a torch.distributed"),
    (_taught(teacher_input=T.clone().requires_grad_()), RuntimeError, "teacher_input must not require grad, because a"),
    (_taught(teacher_weight=H.clone().requires_grad_()), RuntimeError, r".*pass teacher_weight.detach\(\)"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_what_is_wrong_is_refused_with_a_sentence(arguments, error, message):
    with pytest.raises(error, match=f"^linear_kl_div: {message}"):
        ours.linear_kl_div(**arguments)
