"""Patched language models of transformers on an NPU."""

import torch_aclnn_ops
from torch_aclnn_ops.integrations.transformers import patch_model

import peft
import pytest
import torch

from tests._language_models import CHUNK, LOGITS, Step, assert_close, batch, make
from tests._modes import Largest
from tests._own_losses import LOSSES, WithOwnLoss


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "granite"])
def test_loss_and_every_gradient_are_those_of_the_model_as_it_was(family):
    call = {name: one.npu() for name, one in batch().items()}
    model = make(family, attn_implementation="eager").npu()
    expected = Step(model, **call)
    step = Step(patch_model(model, chunk_size=CHUNK), **call)
    assert step.largest < LOGITS <= expected.largest
    assert_close(step, expected, tolerance=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_evaluation_without_logits_has_the_loss_of_the_model_as_it_was(family):
    call = {name: one.npu() for name, one in batch().items()}
    model = make(family, attn_implementation="eager").npu().eval()
    with torch.no_grad():
        expected = model(**call).loss
        with Largest() as largest:
            output = patch_model(model, chunk_size=CHUNK, eval_logits=False)(**call)
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=0)
    assert output.logits is None and largest.elements < LOGITS


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_outside_of_the_forward_pass_is_that_of_the_model_as_it_was(loss):
    call = {name: one.npu() for name, one in batch().items()}
    model = WithOwnLoss(make("gemma2", attn_implementation="eager").npu(), loss)
    expected = Step(model, **call)
    patch_model(model.model, chunk_size=CHUNK, lazy_without_labels=True)
    step = Step(model, **call)
    assert step.largest < LOGITS <= expected.largest
    assert_close(step, expected, tolerance=1e-4)


def test_adapters_of_a_frozen_head_are_in_the_loss():
    call = {name: one.npu() for name, one in batch().items()}
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(make("phi", attn_implementation="eager"), config).npu()
    expected = Step(model, **call)
    step = Step(patch_model(model, chunk_size=CHUNK), **call)
    assert step.largest < LOGITS <= expected.largest
    assert_close(step, expected, tolerance=1e-4)


def test_a_16_bit_head_takes_the_fused_operators():
    call = {name: one.npu() for name, one in batch().items()}
    model = patch_model(make(attn_implementation="eager").to(torch.bfloat16).npu())
    before = torch_aclnn_ops.launches()
    model(**call).loss.backward()
    launched = {name for name, count in torch_aclnn_ops.launches().items() if count > before.get(name, 0)}
    assert {"aclnnFusedLinearOnlineMaxSum", "aclnnFusedLinearCrossEntropyLossGrad"} <= launched
