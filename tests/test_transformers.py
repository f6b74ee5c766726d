"""Language models of transformers with ``patch_model``: loss and gradients of the original model, without logits."""

import warnings
from functools import partial

from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations.transformers import patch_model

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs

from tests._language_models import (
    BATCH,
    CHUNK,
    CLASSES,
    FAMILIES,
    TOKENS,
    Step,
    assert_close,
    assert_patched,
    batch,
    make,
)

_patch = partial(patch_model, chunk_size=CHUNK)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_those_of_the_model_as_it_was_without_its_logits(family):
    assert_patched(make(family), _patch)


def _others(**changed):
    return {**batch(), **changed}


def _shifted():
    return _others(shift_labels=nn.functional.pad(batch()["labels"], (0, 1), value=-100)[:, 1:].contiguous())


CALLS = {
    "num_items_in_batch, a tensor": _others(num_items_in_batch=torch.tensor(17)),
    "num_items_in_batch, a number": _others(num_items_in_batch=17),
    "shift_labels": _shifted(),
    "shift_labels of other rows": _others(shift_labels=batch(1)["labels"].flatten()[None]),
    "ignore_index": _others(labels=batch()["input_ids"], ignore_index=int(batch()["input_ids"][1, 3])),
    "logits_to_keep": _others(logits_to_keep=7, labels=batch()["labels"][:, -7:]),
    "the positions of logits_to_keep": _others(
        logits_to_keep=torch.arange(3, 9), shift_labels=batch()["labels"][:, 4:10].contiguous()
    ),
    "an attention mask": _others(attention_mask=(torch.arange(TOKENS) > 3).expand(BATCH, -1).long()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_models_other_arguments_mean_what_they_meant(call):
    model = make()
    expected = Step(model, **call)
    step = Step(patch_model(model, chunk_size=CHUNK), **call)
    assert_close(step, expected)
    assert isinstance(step.output.logits, LazyLogits) and not step.output.logits.is_materialized


def test_a_mean_over_no_labels_is_what_it_was():
    call = _others(labels=torch.full((BATCH, TOKENS), -100))
    assert make()(**call).loss.isnan() and patch_model(make())(**call).loss.isnan()


def test_labels_that_do_not_fit_get_the_error_that_they_got():
    call = _others(logits_to_keep=3)
    with pytest.raises(ValueError) as expected:
        make()(**call)
    with pytest.raises(ValueError) as error:
        patch_model(make())(**call)
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_models_are_as_near_to_the_truth_as_they_were(dtype):
    exact = make("gemma2").to(dtype).float()
    truth, as_it_was = Step(exact), Step(make("gemma2").to(dtype))
    patched = Step(patch_model(make("gemma2").to(dtype), chunk_size=CHUNK))
    assert patched.loss.dtype == torch.float32
    for name, wanted in truth.gradients.items():
        error, error_as_it_was = ((step.gradients[name] - wanted).norm() for step in (patched, as_it_was))
        assert error <= 1.1 * error_as_it_was + 2 * torch.finfo(dtype).eps * wanted.norm(), name


def test_autocast_reaches_the_head():
    model = make()
    with torch.autocast("cpu", torch.bfloat16):
        expected = Step(model)
        step = Step(patch_model(model, chunk_size=CHUNK))
    assert step.output.logits.dtype == torch.bfloat16
    assert_close(step, expected, tolerance=3e-2)


@pytest.mark.parametrize("is_on", [True, False])
def test_logits_are_those_of_the_autocast_in_which_the_model_was_called(is_on):
    model = make()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
        expected = model(**batch()).logits
        lazy = patch_model(model)(**batch()).logits
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_on):
        found = lazy.materialize()
    assert found.dtype == lazy.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    def patch(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        patch_model(model, chunk_size=CHUNK)

    assert_patched(make(), patch)


@pytest.mark.parametrize("family", ["gemma2", "llama", "granite"])
@pytest.mark.every_nth_case(3)
def test_compiled_models_are_one_graph(family):
    model = make(family, use_cache=False)
    expected = Step(model)
    backend = EagerAndRecordGraphs()
    patch_model(model, chunk_size=CHUNK)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    step = Step(compiled, measured=False)
    assert len(backend.graphs) == 1
    step.gradients = {name.removeprefix("_orig_mod."): one for name, one in step.gradients.items()}
    assert_close(step, expected)


CONTEXTS = {
    "without labels": (True, True, {}),
    "in eval()": (False, True, {"labels": batch()["labels"]}),
    "under no_grad": (True, False, {"labels": batch()["labels"]}),
}


@pytest.mark.parametrize(("training", "grad", "labels"), CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("return_dict", [True, False], ids=["dict", "tuple"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_logits_are_real_where_no_loss_is_trained(family, training, grad, labels, return_dict):
    model = make(family).train(training)
    call = {"input_ids": batch()["input_ids"], **labels, "return_dict": return_dict, "use_cache": False}
    with torch.set_grad_enabled(grad):
        expected = model(**call)
        output = patch_model(model)(**call)
    for index in range(len(expected) if not return_dict else 2 if labels else 1):
        assert isinstance(output[index], Tensor) and torch.equal(output[index], expected[index])


def test_a_loss_of_the_callers_own_can_be_added():
    def gradients(model):
        output = model(**batch())
        (output.loss + output.logits.square().mean()).backward()
        return {name: one.grad for name, one in model.named_parameters()}

    expected, found = gradients(make("granite")), gradients(patch_model(make("granite")))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_hooks_of_the_head_do_what_they_did():
    model = make()
    model.lm_head.register_forward_pre_hook(lambda linear, inputs: inputs[0] * 0.5)
    model.lm_head.register_forward_hook(lambda linear, inputs, output: output / 3)
    assert_patched(model, _patch)


HALVED = {
    "full": lambda head: head.register_full_backward_hook(lambda head, grads, _: (grads[0] * 0.5,)),
    "before": lambda head: head.register_full_backward_pre_hook(lambda head, grads: (grads[0] * 0.5,)),
    "of all modules": lambda head: nn.modules.module.register_module_full_backward_hook(
        lambda module, grads, _: (grads[0] * 0.5,) if module is head else None
    ),
}


@pytest.mark.filterwarnings("ignore:For backward hooks to be called", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", HALVED)
def test_a_backward_hook_of_the_head_changes_the_gradient(kind):
    steps = []
    for patched in (False, True):
        model = patch_model(make()) if patched else make()
        hook = HALVED[kind](model.lm_head)
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", "patch_model: ")
            steps.append(Step(model, **batch()))
        hook.remove()
    assert_close(*reversed(steps))
    assert "a backward hook of the head needs them" in str(caught[-1].message)


def test_logits_that_were_read_under_no_grad_have_their_gradients_all_the_same():
    logits = patch_model(make())(**batch()).logits
    with torch.no_grad():
        logits.argmax(-1)
    assert logits.square().mean().requires_grad


class SGDThroughData(torch.optim.SGD):
    """An optimizer that changes weights without a new version, like optimizers with their own kernels."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(weight.grad, alpha=-group["lr"])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, SGDThroughData])
def test_logits_requested_after_the_optimizer_step_raise(optimizer):
    model = patch_model(make())
    output = model(**batch())
    output.loss.backward()
    optimizer(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="the head's weights or its input changed since"):
        output.logits.sum()


OTHER_LOSSES = {
    "getitem": lambda logits, labels, **_: logits.log_softmax(-1)[labels > 0].square().mean(),
    "type": lambda logits, labels, **_: logits.type(torch.float64).square().mean(),
}


@pytest.mark.parametrize("operation", OTHER_LOSSES)
def test_another_loss_function_has_the_logits_it_needs(operation):
    def with_loss(model):
        model.loss_function = OTHER_LOSSES[operation]
        return model

    expected = Step(with_loss(make()))
    with pytest.warns(UserWarning, match=f"saves no memory: {operation} needs them; use .*cross_entropy"):
        assert_close(Step(with_loss(patch_model(make()))), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("cast", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_class_weights_of_the_dtype_of_cast_logits_are_those_of_the_model_as_it_was(dtype, cast):
    def weighted(logits, labels, **_):
        weight = torch.linspace(0.5, 1, CLASSES, dtype=cast)
        return nn.functional.cross_entropy(logits.to(cast).flatten(0, 1), labels.flatten(), weight=weight)

    losses = []
    for model in (make().to(dtype), patch_model(make().to(dtype))):
        model.loss_function = weighted
        losses.append(model.train()(**batch()).loss)
    assert losses[1].dtype == losses[0].dtype == cast
    torch.testing.assert_close(*losses, rtol=2e-2 if torch.bfloat16 in (dtype, cast) else 1e-5, atol=0)
