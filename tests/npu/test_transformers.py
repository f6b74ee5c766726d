"""Patched language models of transformers on an NPU."""

from functools import partial

from torch_aclnn_ops.integrations.transformers import patch_model

import peft
import pytest
import torch

from tests._language_models import CHUNK, LOGITS, assert_patched, batch, make
from tests._modes import Largest
from tests._own_losses import LOSSES, WithOwnLoss
from tests.npu._operators import counted_launches

EAGER = {"attn_implementation": "eager"}


@pytest.fixture
def call():
    return {name: one.npu() for name, one in batch().items()}


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "granite"])
def test_loss_and_every_gradient_are_those_of_the_model_as_it_was(family, call):
    assert_patched(make(family, **EAGER).npu(), partial(patch_model, chunk_size=CHUNK), 1e-4, **call)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_evaluation_without_logits_has_the_loss_of_the_model_as_it_was(family, call):
    model = make(family, **EAGER).npu().eval()
    with torch.no_grad():
        expected = model(**call).loss
        with Largest() as largest:
            output = patch_model(model, chunk_size=CHUNK, eval_logits=False)(**call)
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=0)
    assert output.logits is None and largest.elements < LOGITS


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_outside_of_the_forward_pass_is_that_of_the_model_as_it_was(loss, call):
    def patch(model):
        patch_model(model.model, chunk_size=CHUNK, lazy_without_labels=True)

    assert_patched(WithOwnLoss(make("gemma2", **EAGER).npu(), loss), patch, 1e-4, **call)


def test_adapters_of_a_frozen_head_are_in_the_loss(call):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(make("phi", **EAGER), config).npu()
    assert_patched(model, partial(patch_model, chunk_size=CHUNK), 1e-4, **call)


def test_a_16_bit_head_takes_the_fused_operators(call):
    model = patch_model(make(**EAGER).to(torch.bfloat16).npu())
    with counted_launches() as launches:
        model(**call).loss.backward()
    assert launches["aclnnFusedLinearOnlineMaxSum"] > 0 < launches["aclnnFusedLinearCrossEntropyLossGrad"]
