"""Patched models with ``lazy_without_labels``: losses outside of the model's forward pass need no logits either."""

import copy
import re
import warnings
from functools import partial

from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations.transformers import patch_model

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests._language_models import CHUNK, LOGITS, LOSSES, Step, WithOwnLoss, assert_close, assert_patched, batch, make
from tests._modes import Largest
from tests.test_hf_trainer import make_trainer


def _patch(model):
    return patch_model(model, chunk_size=CHUNK, lazy_without_labels=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "cohere"])
def test_loss_and_every_gradient_are_those_of_the_model_as_it_was(family, loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_patched(WithOwnLoss(make(family), loss), lambda model: _patch(model.model))


@pytest.mark.parametrize("loss", ["rows", pytest.param("log-probabilities", marks=pytest.mark.exhaustive)])
def test_compiled_models_return_lazy_logits_too(loss):
    model = make()
    expected = Step(WithOwnLoss(copy.deepcopy(model), loss), measured=False)
    model.compile(backend="aot_eager", fullgraph=True)
    step = Step(WithOwnLoss(_patch(model), loss), measured=False)
    assert_close(step, expected)
    assert isinstance(model(batch()["input_ids"]).logits, LazyLogits)


def test_another_loss_has_its_logits_and_one_warning():
    model = _patch(make())
    with pytest.warns(UserWarning, match="square materializes the logits of all tokens, so this loss saves no memory"):
        model(batch()["input_ids"]).logits.square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch()["input_ids"]).logits.square().mean().backward()


def _beside_labels(model):
    output = model(**batch())
    return output.loss + 0.01 * output.logits.logsumexp(-1).square().mean()


def _beside_an_own_loss(model):
    logits = model(batch()["input_ids"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch()["labels"].flatten())
    return loss + 0.01 * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("loss", [_beside_labels, _beside_an_own_loss])
def test_a_term_of_the_logits_beside_a_cross_entropy_has_one_warning(loss):
    model = _patch(make())
    with pytest.warns(UserWarning, match="the gradient of a loss passes logsumexp of the logits of all tokens"):
        loss(model).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(model).backward()


def test_reading_logits_beside_a_loss_has_no_warning():
    output = _patch(make())(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output.logits.argmax(-1)
        output.loss.backward()


def _loss_func(outputs, labels, num_items_in_batch=None):
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), shifted.flatten(), reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize(("options", "loss_func"), [({"label_smoothing_factor": 0.1}, None), ({}, _loss_func)])
def test_a_trainer_that_calls_without_labels_saves_memory_and_says_nothing(options, loss_func, tmp_path):
    found = []
    for model in (make(), _patch(make())):
        steps = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
        trainer, largest = make_trainer(tmp_path, model, average=False, **steps, **options), Largest()
        trainer.compute_loss_func = loss_func
        with largest, warnings.catch_warnings():
            warnings.filterwarnings("error", "patch_model")
            trainer.train()
        found.append(trainer.losses)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert largest.elements < LOGITS


def _fsdp2(model):
    fully_shard(model.lm_head, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


WRAPPERS = {
    "DDP that searches for unused parameters": partial(DistributedDataParallel, find_unused_parameters=True),
    "DDP with a static graph": partial(DistributedDataParallel, static_graph=True),
    "FSDP2": _fsdp2,
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:FutureWarning")
def test_a_wrapper_that_searches_the_outputs_finds_logits_with_one_warning(wrap, mesh_of_one):
    model = WithOwnLoss(wrap(_patch(make())))
    with pytest.warns(UserWarning, match="saves no memory: it was called in training without labels in a wrapper"):
        loss = model(**batch())["loss"]
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters()}
    for name, gradient in Step(WithOwnLoss(make())).gradients.items():
        [wrapped] = [one for one in found if re.sub(r"module\.|_fsdp_wrapped_", "", one) == name]
        whole = found[wrapped].full_tensor() if hasattr(found[wrapped], "full_tensor") else found[wrapped]
        torch.testing.assert_close(whole, gradient, rtol=1e-4, atol=1e-6)
