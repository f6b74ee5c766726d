"""Every type of language model that transformers has: the loss of the model as it was, and no logits."""

import warnings

from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations.transformers import patch_model

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests._language_models import Step
from tests._model_types import CASES, CLASSES, LOGITS, NOT_COMPARED, batch, make

ALWAYS = {("causal", "opt"), ("causal", "bart"), ("seq2seq", "marian"), ("masked", "bert")}


class Logits(TorchDispatchMode):
    """Sees whether a tensor with memory has the shape of logits."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and not one.is_meta and one.shape[-1:] == (CLASSES,) and one.numel() == LOGITS:
                self.seen = True
        return result


def _cases():
    for case in CASES:
        if case not in NOT_COMPARED:
            yield pytest.param(*case, id="-".join(case), marks=[] if case in ALWAYS else [pytest.mark.exhaustive])


@pytest.mark.parametrize(("kind", "model_type"), list(_cases()))
def test_the_loss_and_its_gradients_are_those_of_the_model_without_logits(kind, model_type):
    model = make(kind, model_type)
    with Logits() as logits:
        expected = Step(model, measured=False, **batch(kind))
    assert logits.seen
    patch_model(model, chunk_size=16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="patch_model")
        step = Step(model, measured=False, **batch(kind))
    lazy = [one for one in step.output.values() if isinstance(one, LazyLogits)]
    assert lazy and not any(one.is_computed for one in lazy)
    torch.testing.assert_close(step.loss, expected.loss, rtol=1e-4, atol=0)
    assert step.gradients.keys() == expected.gradients.keys()
    # Of a sum that is 0, as a key's bias has it, only rounding is left.
    size = max(one.abs().max() for one in expected.gradients.values())
    for name, wanted in expected.gradients.items():
        assert (step.gradients[name] - wanted).abs().max() <= 1e-4 * max(wanted.abs().max(), 1e-2 * size), name


def test_what_is_not_compared_is_a_type_that_there_is():
    assert NOT_COMPARED.keys() < set(CASES)
