"""Every type of language model that transformers has: the loss of the model as it was, and no logits."""

import inspect
import warnings
from unittest.mock import patch

import torch_aclnn_ops
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations.transformers import patch_model

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks._figures import put_between
from tests._language_models import Step
from tests._tiny_configs import CLASSES
from tests.model_types import (
    CASES,
    LOGITS,
    NEEDS_TIMM,
    NO_LABELS,
    NO_LINEAR,
    PAGE,
    TITLE,
    WARNINGS,
    WITH_LOGITS,
    WITHOUT_LOGITS,
    batch,
    cases_of,
    class_of,
    make,
    page,
)

ALWAYS = {
    ("causal", "opt"),
    ("causal", "bart"),
    ("causal", "prophetnet"),
    ("seq2seq", "t5"),
    ("seq2seq", "fsmt"),
    ("masked", "bert"),
}


class Logits(TorchDispatchMode):
    """Sees whether a tensor with memory has the shape of logits of at least half of the tokens."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and not one.is_meta and one.shape[-1:] == (CLASSES,):
                self.seen |= one.numel() >= LOGITS // 2
        return result


def _step(model, inputs):
    with Logits() as logits, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = Step(model, measured=False, **inputs)
    return step, logits.seen, [str(one.message) for one in warned if "patch_model" in str(one.message)]


def _assert_equal(step, expected):
    torch.testing.assert_close(step.loss, expected.loss, rtol=1e-4, atol=0)
    assert step.gradients.keys() == expected.gradients.keys()
    # Of a sum that is 0, as a key's bias has it, only rounding is left.
    size = max(one.abs().max() for one in expected.gradients.values())
    for name, wanted in expected.gradients.items():
        assert (step.gradients[name] - wanted).abs().max() <= 1e-4 * max(wanted.abs().max(), 1e-2 * size), name


def _cases(always):
    for case in WITHOUT_LOGITS:
        yield pytest.param(*case, id="-".join(case), marks=[] if case in always else [pytest.mark.exhaustive])


@pytest.mark.parametrize(("kind", "model_type"), list(_cases(ALWAYS)))
def test_the_loss_and_its_gradients_are_those_of_the_model_without_logits(kind, model_type):
    model = make(kind, model_type)
    inputs = batch(kind, model_type, model.config)
    expected, are_logits_seen, _ = _step(model, inputs)
    assert are_logits_seen
    step, _, warned = _step(patch_model(model, chunk_size=16), inputs)
    lazy = [one for one in step.output.values() if isinstance(one, LazyLogits)]
    assert not warned and lazy and not any(one.is_materialized for one in lazy)
    _assert_equal(step, expected)


# This one multiplies what an embedding returns in place.
@pytest.mark.parametrize(("kind", "model_type"), list(_cases({("causal", "ctrl")})))
def test_a_model_trains_the_same_with_the_functions_in_torch_s_place(kind, model_type):
    model = make(kind, model_type)
    inputs = batch(kind, model_type, model.config)
    expected, *_ = _step(model, inputs)
    with torch_aclnn_ops.patch():
        step, *_ = _step(model, inputs)
    _assert_equal(step, expected)


@pytest.mark.parametrize(("kind", "model_type"), cases_of(*WARNINGS))
def test_where_the_loss_needs_the_logits_it_is_the_same_and_one_warning_says_why(kind, model_type):
    model = make(kind, model_type)
    inputs = batch(kind, model_type, model.config)
    expected, *_ = _step(model, inputs)
    step, _, warned = _step(patch_model(model, chunk_size=16), inputs)
    _assert_equal(step, expected)
    assert len(warned) == 1 and WARNINGS[WITH_LOGITS[kind, model_type]] in warned[0]
    assert _step(model, inputs)[2] == []


@pytest.mark.parametrize(("kind", "model_type"), cases_of(NO_LINEAR))
def test_a_head_without_a_linear_layer_is_refused(kind, model_type):
    with pytest.raises(TypeError, match="head must be a torch.nn.Linear"):
        patch_model(make(kind, model_type))


@pytest.mark.parametrize(("kind", "model_type"), cases_of(NO_LABELS))
def test_a_type_without_a_loss_takes_no_labels(kind, model_type):
    assert "labels" not in inspect.signature(class_of(kind, model_type).forward).parameters


@pytest.mark.parametrize(("kind", "model_type"), cases_of(NEEDS_TIMM))
def test_a_type_that_is_not_tested_needs_what_the_page_says(kind, model_type):
    with patch.dict("sys.modules", {"timm": None}), pytest.raises(ImportError, match="timm"):
        make(kind, model_type)


def test_every_exception_is_a_type_that_there_is_and_of_a_known_reason():
    assert WITH_LOGITS.keys() < set(CASES)
    assert set(WITH_LOGITS.values()) == {NO_LABELS, NEEDS_TIMM, NO_LINEAR, *WARNINGS}


def test_the_page_shows_the_types():
    written = PAGE.read_text()
    assert put_between(written, TITLE, page()) == written, "run python -m tests.model_types"
