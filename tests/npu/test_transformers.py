"""Patched language models of transformers on an NPU."""

import torch_aclnn_ops
from torch_aclnn_ops.integrations.transformers import patch_model

import pytest
import torch

from tests._language_models import CHUNK, LOGITS, Largest, Step, assert_close, batch, make


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
        with Largest() as largest, pytest.warns(UserWarning, match="returns no logits"):
            output = patch_model(model, chunk_size=CHUNK, eval_logits=False)(**call)
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=0)
    assert output.logits is None and largest.elements < LOGITS


def test_a_16_bit_head_takes_the_fused_operators():
    call = {name: one.npu() for name, one in batch().items()}
    model = patch_model(make(attn_implementation="eager").to(torch.bfloat16).npu())
    before = torch_aclnn_ops.launches()
    model(**call).loss.backward()
    launched = {name for name, count in torch_aclnn_ops.launches().items() if count > before.get(name, 0)}
    assert {"aclnnFusedLinearOnlineMaxSum", "aclnnFusedLinearCrossEntropyLossGrad"} <= launched
