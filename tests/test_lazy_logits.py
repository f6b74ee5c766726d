"""Lazy logits: they behave like logits in operations of torch, and their loss does not materialize them."""

import copy
import gc
import io
import pickle
import weakref

from torch_aclnn_ops.integrations import _lazy_heads
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits, materialized
from torch_aclnn_ops.integrations._materializations import Materializations

import numpy as np
import pytest
import torch
from torch import nn

from tests._logit_operations import ARGUMENTS, differs, functions, lazy_logits, outcome, real_logits

FUNCTIONS = list(functions())
CASES = [
    pytest.param(function, id=name, marks=[pytest.mark.exhaustive] if index % 60 else [])
    for index, (name, function) in enumerate(FUNCTIONS)
]
TARGET = torch.tensor([[4, -100, 7]])
INDEX = TARGET.clamp(min=0)[..., None]
_log_softmax = nn.functional.log_softmax


@pytest.mark.parametrize("function", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_function_of_torch_finds_in_lazy_logits_what_it_finds_in_real_ones(function):
    for name in ARGUMENTS:
        expected = outcome(function, name, real_logits)
        if not isinstance(expected, type):
            assert not differs(outcome(function, name, lazy_logits), expected), name


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def _saved(logits):
    file = io.BytesIO()
    torch.save(logits.detach(), file)
    file.seek(0)
    return torch.load(file)


def _written(logits):
    logits[..., 3] = 0.5
    logits.mul_(2)
    return logits


def _written_by_a_view(logits):
    logits.view(-1, 50)[0, 0] = 5.0
    return logits


def _doubled_in_place(logits):
    rows = logits.view(-1, 50)
    logits *= 2
    return rows + logits[0]


def _doubled_after_a_copy(logits):
    rows = logits.view(-1, 50)
    wide = rows.double()
    logits *= 2
    return wide + rows


def _before_writing(derive):
    def derived(logits):
        found = derive(logits)
        logits.mul_(3)
        return materialized(found)

    return derived


USES = {
    "numpy": lambda logits: torch.from_numpy(np.asarray(logits.detach())),
    "tolist": lambda logits: torch.tensor(logits.tolist()),
    "torch.func.grad": lambda logits: torch.func.grad(lambda one: one.square().sum())(logits.detach()),
    "pickle": lambda logits: pickle.loads(pickle.dumps(logits.detach())),
    "torch.save": _saved,
    "copy.copy of detached": lambda logits: copy.copy(logits.detach()),
    "a deep copy of detached": lambda logits: copy.deepcopy(logits.detach()),
    "an iteration": lambda logits: torch.stack([row for rows in logits for row in rows]),
    "an autograd.Function": lambda logits: Reversed.apply(materialized(logits)),
    "writing": _written,
    "an augmented assignment": _doubled_in_place,
    "an augmented assignment after a cast of a view": _doubled_after_a_copy,
    "a transform that closes over them": lambda logits: (
        logits + torch.func.grad(lambda one: (one * logits).sum())(torch.ones(50)).detach()
    ),
    "a cross entropy after writing": lambda logits: _loss(_written(logits)),
    "a cross entropy after writing to a view": lambda logits: _loss(_written_by_a_view(logits)),
    "checkpoint": lambda logits: torch.utils.checkpoint.checkpoint(torch.exp, logits, use_reentrant=False),
    "a module": lambda logits: nn.Softmax(-1)(logits),
    "an einsum": lambda logits: torch.einsum("btc,bsc->bts", logits, logits),
    "a compiled function": torch.compile(lambda logits: logits.float().exp().sum(), backend="eager"),
    "out=": lambda logits: torch.exp(logits.detach(), out=torch.empty(1, 3, 50)),
    "parameters_to_vector": lambda logits: nn.utils.parameters_to_vector([logits]),
    "a nest of two kinds": lambda logits: torch.cat([logits, torch.ones(1, 3, 50)]),
    "log-probabilities before writing": _before_writing(lambda logits: logits.log_softmax(-1)),
    "a copy of rows before writing": _before_writing(lambda logits: logits[:, ::2].transpose(0, 1).reshape(-1, 50)),
    "rows of a mask before writing": _before_writing(lambda logits: logits[TARGET >= 0]),
    "a reshaped view before writing": _before_writing(lambda logits: logits[:, ::2].reshape(1, 2, 5, 10)),
    "exp of log-probabilities": lambda logits: logits.log_softmax(-1).exp(),
    "a sum of rows of them": lambda logits: logits.log_softmax(-1).sum(1),
    "a sum of all of them": lambda logits: logits.log_softmax(-1).sum(),
    "several classes of them": lambda logits: logits.log_softmax(-1).gather(-1, INDEX.expand(1, 3, 2)),
    "fewer rows of them": lambda logits: logits.log_softmax(-1).gather(-1, INDEX[:, :2]),
    "a row of them": lambda logits: logits.log_softmax(-1)[0, 1],
    "one class of them": lambda logits: logits.log_softmax(-1)[..., 3],
    "their sum with themselves": lambda logits: logits.log_softmax(-1) + logits.log_softmax(-1),
    "their mean": lambda logits: logits.log_softmax(-1).mean(),
}


def _loss(logits):
    return nn.functional.cross_entropy(logits.view(-1, 50), TARGET.view(-1))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_what_is_no_function_of_torch_finds_the_same_too(use):
    def found(logits):
        made, sources = logits()
        result = use(made)
        gradients = torch.autograd.grad(result.sum(), sources) if result.requires_grad else ()
        return result, *gradients

    assert not differs(found(lazy_logits), found(real_logits))


@pytest.mark.parametrize("make", [real_logits, lazy_logits])
@pytest.mark.parametrize("write", ["logits", "weight"])
def test_writing_to_what_the_gradient_needs_raises(make, write):
    logits, (_, weight, _) = make()
    bounded = torch.tanh(logits)
    loss = bounded.sum()
    with torch.no_grad():
        (bounded if write == "logits" else weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


METADATA = {
    "shape": lambda logits: (logits.shape, logits.size(), logits.size(-1), len(logits), logits.ndim, logits.dim()),
    "strides": lambda logits: (logits.stride(), logits.storage_offset(), logits.is_contiguous(), logits.layout),
    "dtype": lambda logits: (logits.dtype, logits.is_floating_point(), logits.element_size(), logits.is_complex()),
    "device": lambda logits: (logits.device, logits.is_cpu, logits.is_cuda, logits.get_device(), logits.is_meta),
    "functions": lambda logits: (torch.numel(logits), torch.is_floating_point(logits), torch.is_complex(logits)),
    "graph": lambda logits: (logits.requires_grad, logits.is_leaf, logits.grad),
}


@pytest.mark.parametrize("derive", [lambda logits: logits, lambda logits: logits[:, 1:].transpose(0, 1)])
@pytest.mark.parametrize("read", METADATA.values(), ids=METADATA)
def test_metadata_needs_no_logits(read, derive):
    lazy = derive(lazy_logits()[0])
    assert read(lazy) == read(derive(real_logits()[0]))
    assert not lazy.is_materialized


def test_rows_of_an_iteration_are_lazy():
    logits, _ = lazy_logits()
    [rows] = logits
    assert rows.shape == (3, 50) and len(list(rows)) == 3 and not logits.is_materialized
    with pytest.raises(TypeError, match="0-d tensor"):
        iter(logits[0, 0, 0])


@pytest.mark.parametrize("name", ["grad", "data", "requires_grad", "shape"])
def test_attributes_of_tensors_are_not_set_on_what_is_none(name):
    with pytest.raises(AttributeError, match="no setter"):
        setattr(lazy_logits()[0], name, None)


LOSSES = {
    "rows": lambda logits: _loss(logits),
    "contiguous rows": lambda logits: _loss(logits.contiguous()),
    "shifted": lambda logits: _of(logits[..., :-1, :].contiguous().view(-1, 50), TARGET[:, 1:].reshape(-1)),
    "shifted, reshaped": lambda logits: _of(logits[:, 1:].contiguous().reshape(-1, logits.size(-1)), TARGET[0, 1:]),
    "in float32": lambda logits: _loss(logits.float()),
    "in float64": lambda logits: _loss(logits.to(torch.float64)),
    "to its own device": lambda logits: _loss(logits.to("cpu")),
    "a module": lambda logits: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, 50), TARGET[0]),
    "classes in the middle": lambda logits: _of(logits.transpose(1, 2), TARGET, reduction="none"),
    "permuted": lambda logits: _of(logits.permute(0, 2, 1), TARGET, reduction="sum"),
    "every second": lambda logits: _of(logits[0, ::2], TARGET[0, ::2]),
    "one row": lambda logits: _of(logits[0, 2], TARGET[0, 2]),
    "the last row": lambda logits: _of(logits[:, -1], TARGET[:, -1]),
    "transposed": lambda logits: _of(logits.transpose(0, 1).contiguous().view(-1, 50), TARGET.T.reshape(-1)),
    "class weights": lambda logits: _of(logits[0], TARGET[0], weight=torch.linspace(0, 1, 50)),
    "ignore_index": lambda logits: _of(logits[0], TARGET[0].clamp(min=0), ignore_index=7),
    "not reduced": lambda logits: _of(logits.flatten(0, 1), TARGET[0], reduction="none"),
    "reduced as in old times": lambda logits: _of(logits.flatten(0, 1), TARGET[0], size_average=False),
    "a softcap": lambda logits: _loss(torch.tanh(logits / 0.7) * 0.7),
    "a bound that is no softcap": lambda logits: _loss(torch.tanh(logits * 0.3).float() * 5 / 2),
    "the bound of a sum": lambda logits: _loss(torch.tanh((logits * 2 + logits / 3) / 4) * 6),
    "a vector": lambda logits: _loss(logits + torch.linspace(-1, 1, 50)[None]),
    "factors and a vector": lambda logits: _loss((logits * 2 + torch.linspace(-1, 1, 50)) / 3),
    "a sum of both": lambda logits: _loss(logits + logits * 0.5 + torch.linspace(-1, 1, 50)),
    "a clone": lambda logits: _loss(logits.clone()),
    "a new dimension": lambda logits: _of(logits.unsqueeze(1).squeeze(1)[0], TARGET[0]),
    "every second, reshaped": lambda logits: _of(logits[:, ::2].reshape(-1, 50), TARGET[0, ::2]),
    "transposed, flattened": lambda logits: _of(logits.transpose(0, 1).flatten(0, 1), TARGET[0]),
    "a mask": lambda logits: _of(logits[TARGET >= 0], TARGET[TARGET >= 0]),
    "a mask of sequences": lambda logits: _of(logits[TARGET[:, 0] == 4].transpose(1, 2), TARGET),
    "a mask of flattened rows": lambda logits: _of(logits.view(-1, 50)[TARGET[0] >= 0], TARGET[0, ::2]),
    "log-probabilities": lambda logits: -logits.log_softmax(-1).gather(-1, INDEX).mean(),
    "log-probabilities of rows": lambda logits: torch.log_softmax(logits[0, 1:], dim=1).gather(1, INDEX[0, 1:]).sum(),
    "log-probabilities in float64": lambda logits: _log_softmax(logits, 2, dtype=torch.float64).gather(2, INDEX).sum(),
    "the same, by position": lambda logits: logits.log_softmax(2, torch.float64).gather(2, INDEX).sum(),
    "their sum": lambda logits: _log_softmax(logits, dim=-1).sum(-1)[0] @ torch.arange(3.0),
    "nll_loss": lambda logits: nn.functional.nll_loss(_log_softmax(logits, -1).view(-1, 50), TARGET[0]),
    "a module of log-probabilities": lambda logits: nn.NLLLoss(torch.linspace(0, 1, 50), ignore_index=4)(
        _log_softmax(logits.view(-1, 50), -1), TARGET[0].clamp(min=0)
    ),
    "a smoothed loss": lambda logits: _smoothed(logits),
}


def _of(*args, **kwargs):
    return nn.functional.cross_entropy(*args, **kwargs)


def _smoothed(logits):
    losses = -_log_softmax(torch.tanh(logits / 3.0) * 3.0, dim=-1)
    return losses.gather(dim=-1, index=INDEX).sum() + losses.sum(dim=-1, keepdim=True, dtype=torch.float64).sum()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_cross_entropy_of_rows_is_computed_without_logits(loss):
    expected, sources = real_logits()
    logits, own = lazy_logits()
    found, wanted = loss(logits), loss(expected)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), own), torch.autograd.grad(wanted.sum(), sources))
    assert not logits.is_materialized


@pytest.mark.parametrize("index", [-100, 50, -(2**62)])
def test_an_index_out_of_range_raises_as_gather_does(index):
    log_probs = lazy_logits()[0].log_softmax(-1)
    with pytest.raises((IndexError, RuntimeError)):
        log_probs.gather(-1, torch.full((1, 3, 1), index))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_float32_sum_of_16_bit_log_probabilities_is_not_rounded_to_16_bits(dtype):
    torch.manual_seed(0)
    linear, input = nn.Linear(8, 20_000), torch.randn(3, 8)
    expected = linear.to(dtype).double()(input.to(dtype).double()).log_softmax(-1).sum(-1)
    _lazy_heads.patch(linear.to(dtype), {}, Materializations())
    found = linear(input.to(dtype)).log_softmax(-1).sum(-1, dtype=torch.float32)  # too small a number for float16
    torch.testing.assert_close(found, expected.float())


COMPUTED = {
    "probabilities": lambda logits: _of(logits[0], torch.full((3, 50), 0.02)),
    "part of the classes": lambda logits: _of(logits[0, :, :20], TARGET[0]),
    "classes as rows": lambda logits: _of(logits[0].T, torch.tensor([1] * 50)),
    "a mask of elements": lambda logits: _of(logits[logits > -9].view(-1, 50), TARGET[0]),
    "a vector that is no bias": lambda logits: _loss(logits + torch.ones(3, 1)),
}


@pytest.mark.parametrize("loss", COMPUTED.values(), ids=COMPUTED)
def test_another_cross_entropy_is_that_of_the_logits(loss):
    expected, _ = real_logits()
    logits, _ = lazy_logits()
    torch.testing.assert_close(loss(logits), loss(expected))
    assert logits.is_materialized


def test_a_target_that_does_not_fit_gets_torchs_error():
    for target in (TARGET, TARGET[0, :2], TARGET.float()):
        with pytest.raises(Exception) as expected:
            _of(real_logits()[0].view(-1, 50), target)
        with pytest.raises(type(expected.value)) as found:
            _of(lazy_logits()[0].view(-1, 50), target)
        assert str(found.value) == str(expected.value)


GRADIENTS = {
    "a hook": lambda logits, loss: logits.register_hook(print),
    "retain_grad": lambda logits, loss: logits.retain_grad(),
    "a hook of the node": lambda logits, loss: logits.grad_fn.register_prehook(print),
    "a hook for several": lambda logits, loss: torch.autograd.graph.register_multi_grad_hook([logits], print),
    "autograd.grad": lambda logits, loss: torch.autograd.grad(loss, logits),
    "autograd.grad of several": lambda logits, loss: torch.autograd.grad([loss], inputs=[logits]),
    "backward": lambda logits, loss: torch.autograd.backward(loss, inputs=[logits]),
}


NO_GRADIENT = "computed without its logits.*call unpatch_model"


@pytest.mark.parametrize("is_materialized", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_logits_have_no_gradient_and_take_no_hooks(name, is_materialized):
    logits, (input, *_) = lazy_logits()
    loss = _loss(logits)
    if is_materialized:
        logits.materialize()
    # Before 2.11, torch does not call __torch_function__ of the inputs of backward.
    is_torchs = name == "backward" and torch.__version__ < (2, 11)
    expected = "inputs have to be Tensors or GradientEdges, but got LazyLogits" if is_torchs else NO_GRADIENT
    with pytest.raises(RuntimeError, match=expected):
        GRADIENTS[name](logits, loss)
    assert input.grad is None


def test_a_result_of_the_logits_is_differentiated_by_what_they_depend_on():
    def found(logits):
        made, (input, weight, _) = logits()
        (gradient,) = torch.autograd.grad(made.exp().sum() + _loss(made * 2), weight, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [input, weight])

    assert not differs(found(lazy_logits), found(real_logits))


def test_logits_that_were_frozen_by_no_grad_have_no_gradient():
    logits, sources = lazy_logits()
    with torch.no_grad():
        scaled = logits * 2
    assert not _loss(scaled).requires_grad and not scaled.requires_grad


def test_lazy_logits_are_freed_without_a_garbage_collection():
    logits, _ = lazy_logits()
    gone, tensor = weakref.ref(logits), weakref.ref(logits.materialize())
    _loss(logits).backward()
    gc.disable()
    try:
        del logits
        assert gone() is None and tensor() is None
    finally:
        gc.enable()


def test_the_class_says_what_it_is():
    assert repr(lazy_logits()[0]) == "LazyLogits(shape=(1, 3, 50), dtype=torch.float32, device=cpu)"
    assert type(lazy_logits()[0]) is LazyLogits
