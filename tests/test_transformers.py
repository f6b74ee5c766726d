"""Language models of transformers with ``patch_model``: loss and gradients of the model as it was, without logits."""

import copy
import logging
import pickle
import warnings
from functools import partial

from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations.transformers import patch_model, unpatch_model

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs

from tests._language_models import (
    BATCH,
    CHUNK,
    CLASSES,
    FAMILIES,
    LOGITS,
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


def test_generated_tokens_are_what_they_were():
    model = make().eval()
    tokens = batch()["input_ids"][:, :4]
    expected = model.generate(tokens, max_new_tokens=5, do_sample=False)
    assert torch.equal(patch_model(model).generate(tokens, max_new_tokens=5, do_sample=False), expected)


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


def test_a_head_that_came_after_the_patch_is_in_the_loss_too():
    def resized(model):
        model.resize_token_embeddings(CLASSES - 8, mean_resizing=False)
        return model

    call = {name: one.clamp(max=CLASSES - 9) for name, one in batch().items()}
    expected = Step(resized(make()), **call)
    model = resized(patch_model(make()))
    assert_close(Step(model, **call), expected)
    step = Step(patch_model(model, chunk_size=CHUNK), **call)  # again
    assert step.largest < LOGITS and "forward" not in vars(unpatch_model(model).lm_head)
    assert_close(step, expected)


def test_logits_that_were_read_under_no_grad_have_their_gradients_all_the_same():
    logits = patch_model(make())(**batch()).logits
    with torch.no_grad():
        logits.argmax(-1)
    assert logits.square().mean().requires_grad


class SGDThroughData(torch.optim.SGD):
    """An optimizer that changes weights without a new version, as those do that call kernels of their own."""

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


def _everything(model):
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]


def test_unpatch_restores_exactly():
    model = make()
    before = _everything(model)
    assert unpatch_model(patch_model(patch_model(model), chunk_size=CHUNK)) is model
    assert _everything(model) == before
    assert unpatch_model(model) is model


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


def test_what_was_patched_is_logged(caplog):
    with caplog.at_level(logging.INFO, "torch_aclnn_ops"):
        patch_model(make())
    assert "logits of this LlamaForCausalLM are lazy: outputs of lm_head (16 x 512)" in caplog.text


def test_a_model_that_saves_no_memory_is_told_of_once_and_one_that_does_never(recwarn):
    model = patch_model(make())
    Step(model)
    assert not recwarn
    model.resize_token_embeddings(CLASSES + 8, mean_resizing=False)
    Step(model)
    Step(model)
    [warning] = recwarn
    assert "its head was replaced or got adapters after patch_model" in str(warning.message)


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


def test_a_head_in_evaluation_mode_is_told_of():
    model = patch_model(make()).train()
    model.lm_head.eval()
    with pytest.warns(UserWarning, match="saves no memory: its head is in evaluation mode; call train"):
        model(**batch())


class Packed(Tensor):
    """Stands for the weights of torchao."""


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_quantized_weight_is_told_of_by_name(is_adapted):
    model = make()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Packed))
    if is_adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=4))
    with pytest.warns(UserWarning, match="saves no memory: the weight of its head is a Packed, not a plain tensor"):
        patch_model(model)(**batch())


def test_labels_that_are_given_by_position_are_told_of_too(recwarn):
    model = patch_model(make())
    model.lm_head.register_forward_hook(lambda linear, inputs, output: output.sigmoid())
    call = batch()
    model(call["input_ids"], None, None, None, None, call["labels"])
    [warning] = recwarn
    assert "sigmoid needs them" in str(warning.message)


def test_a_patched_model_has_the_checkpoint_of_the_model(tmp_path):
    model = make()
    names = model.state_dict().keys()
    assert patch_model(model).state_dict().keys() == names
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert all(torch.equal(loaded.state_dict()[name], one) for name, one in model.state_dict().items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_trains_its_own_weights(copied):
    model = patch_model(make(), chunk_size=CHUNK)
    copy_of_it = copied(model)
    with torch.no_grad():
        copy_of_it.lm_head.weight.mul_(0.5)
    step = Step(copy_of_it)
    assert step.largest < LOGITS and model.lm_head.weight.grad is None
    assert_close(step, Step(unpatch_model(copy_of_it)))
    assert isinstance(model(**batch()).logits, LazyLogits)


def _of(change):
    model = make()
    change(model)
    return model


class Linear4bit(nn.Linear):
    """Stands for the layers of bitsandbytes."""

    def forward(self, input):
        return input @ self.weight.T


REFUSALS = {
    "a layer": (lambda: nn.Linear(2, 2), TypeError, "model must be a transformers.PreTrainedModel.*but it is a Linear"),
    "a wrapper": (lambda: nn.DataParallel(make()), TypeError, "but it is a DataParallel; call it before"),
    "DistributedDataParallel": (
        lambda: nn.parallel.DistributedDataParallel(make()),
        TypeError,
        "but it is a DistributedDataParallel; call it before",
    ),
    "a compiled model": (lambda: torch.compile(make()), TypeError, "but it is a OptimizedModule; call it before"),
    "no head": (lambda: make().model, TypeError, r"get_output_embeddings\(\) of this LlamaModel is None"),
    "a head without linear layers": (
        lambda: _of(lambda model: model.set_output_embeddings(nn.Identity())),
        TypeError,
        "head must be a torch.nn.Linear.*is a torch.nn.modules.linear.Identity",
    ),
    "a quantized head": (
        lambda: _of(lambda model: model.set_output_embeddings(Linear4bit(16, CLASSES))),
        TypeError,
        r"head must be a torch.nn.Linear.*is a .*\.Linear4bit",
    ),
    "a replaced forward": (
        lambda: _of(lambda model: setattr(model.lm_head, "forward", model.lm_head.forward)),
        RuntimeError,
        "forward of the model's head has already been replaced",
    ),
}


@pytest.mark.parametrize(("make_wrong", "error", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_unsupported_models_raise_a_clear_error(make_wrong, error, sentence, mesh_of_one):
    with pytest.raises(error, match=sentence):
        patch_model(make_wrong())


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"chunk_size": -1}, ValueError, "chunk_size must be at least 1, but it is -1"),
        ({"max_memory": "1GB"}, TypeError, "max_memory must be None or an int, but it is '1GB'"),
        ({"chunk_size": 2, "max_memory": 9}, ValueError, "chunk_size and max_memory must not both be given"),
    ],
    ids=str,
)
def test_invalid_options_raise_before_the_model_is_changed(options, error, sentence):
    model = make()
    with pytest.raises(error, match=f"patch_model: {sentence}"):
        patch_model(model, **options)
    assert not model._forward_hooks and "forward" not in vars(model.lm_head)


def test_a_head_whose_forward_others_have_replaced_is_not_unpatched():
    model = patch_model(make())
    ours = model.lm_head.forward
    model.lm_head.forward = lambda input: ours(input)
    with pytest.raises(RuntimeError, match="another library has replaced"):
        unpatch_model(model)


def test_weights_unsharded_only_in_the_heads_forward_raise():
    # As ZeRO-3 does it.
    model = patch_model(make())
    weight = model.lm_head.weight.detach()

    def gather(linear, inputs):
        linear.weight.data = weight

    def release(linear, inputs, output):
        linear.weight.data = torch.empty(0)

    model.lm_head.register_forward_pre_hook(gather)
    model.lm_head.register_forward_hook(release)
    with pytest.raises(RuntimeError, match="the head's weights are still sharded.*FSDP1, ZeRO-3.*unpatch_model"):
        model(**batch())
