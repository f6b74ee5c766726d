"""patch_model and unpatch_model: what they refuse, warn about and restore; copies and checkpoints of models."""

import copy
import logging
import pickle

from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations.transformers import patch_model, unpatch_model

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from tests._language_models import CHUNK, CLASSES, LOGITS, Step, assert_close, batch, make


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


def test_a_head_in_evaluation_mode_is_told_of():
    model = patch_model(make()).train()
    model.lm_head.eval()
    with pytest.warns(UserWarning, match="saves no memory: its head is in evaluation mode; call train"):
        model(**batch())


class Packed(Tensor):
    """A stand-in for the weights of torchao."""


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
    """A stand-in for the layers of bitsandbytes."""

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
    # Like ZeRO-3.
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
