"""Every language model type of transformers: the loss of the original model, without logits.

``python -m tests.test_model_types`` writes the effect of patch_model on each type's loss to docs/works_with.md.
"""

import copy
import inspect
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch_aclnn_ops
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations.transformers import patch_model

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from benchmarks._figures import put_between, write_between
from benchmarks._results import format_table
from tests._language_models import Step, assert_close
from tests._tiny_configs import CLASSES, tiny

PAGE = Path(__file__).parents[1] / "docs/works_with.md"
TITLE = "Types of models"
KINDS = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
CASES = [(kind, model_type) for kind, names in KINDS.items() for model_type in names]
BATCH, TOKENS = 2, 32
LOGITS = BATCH * TOKENS * CLASSES
PARAMETERS = 3_000_000


def make(kind: str, model_type: str) -> transformers.PreTrainedModel:
    """Return a model in training mode, always with the same weights, which are large enough for softcaps to matter."""
    torch.manual_seed(0)
    model_class = class_of(kind, model_type)
    config = tiny(model_class.config_class)
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(one.numel() for one in model_class(copy.deepcopy(config)).parameters())
    if size > PARAMETERS:
        raise ValueError(f"{size} parameters")
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.float().train()


def class_of(kind: str, model_type: str) -> type[transformers.PreTrainedModel]:
    """Return the class of a model type."""
    return getattr(transformers, KINDS[kind][model_type])


def batch(kind: str, model_type: str, config: transformers.PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return tokens, other or the same tokens as labels, some ignored, and further inputs of a type."""
    tokens = torch.randint(3, CLASSES, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(3, 1) if kind == "seq2seq" else tokens.clone()
    labels[0, 5:9] = -100
    more = _MORE_INPUTS.get(model_type, lambda config, tokens: {})
    return {"input_ids": tokens, "labels": labels, **more(config, tokens)}


def _codebooks(config: transformers.PretrainedConfig, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    number = config.num_codebooks
    return {"input_ids": tokens.repeat_interleave(number, 0), "labels": tokens[..., None].repeat(1, 1, number)}


def _image(config: transformers.PretrainedConfig, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.ones(len(tokens), 3, *2 * (config.vision_config.image_size,))}


def _sound(config: transformers.PretrainedConfig, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    frames = TOKENS * config.audio_length_per_tok
    return {"input_features": torch.ones(len(tokens), config.audio_config.num_mel_bins, frames)}


_MORE_INPUTS = {"git": _image, "musicgen": _codebooks, "musicgen_melody": _codebooks, "voxtral_realtime": _sound}

NO_LABELS = "has no loss: its forward pass takes no labels"
NEEDS_TIMM = "is not tested: the model needs timm"
NO_LINEAR = "`patch_model` raises: the head is not just a linear layer"
STACKED = "`patch_model` warns: the logits of several heads are stacked before the loss"
WEIGHTS = "`patch_model` warns: the model multiplies by the head's weights itself, together with others"
# The text of a warning, by the sentence on the page.
WARNINGS = {STACKED: "stack needs them", WEIGHTS: "was not called as a linear layer"}
WITH_LOGITS = {
    ("causal", "dory"): NO_LINEAR,
    ("causal", "gemma3n"): NEEDS_TIMM,
    ("causal", "gemma4_assistant"): NO_LABELS,
    ("causal", "gemma4_unified_assistant"): NO_LABELS,
    ("causal", "musicgen"): STACKED,
    ("causal", "musicgen_melody"): STACKED,
    ("masked", "mobilebert"): WEIGHTS,
    ("masked", "perceiver"): NO_LINEAR,
}
WITHOUT_LOGITS = [case for case in CASES if case not in WITH_LOGITS]


def cases_of(*reasons: str) -> list[tuple[str, str]]:
    """Return the cases with one of these reasons."""
    return [case for case, reason in WITH_LOGITS.items() if reason in reasons]


def page() -> str:
    """Return the text of the page: the number of types, and a table of the exceptions."""
    exceptions = [
        {"model type": f"`{model_type}`", "class": f"`{KINDS[kind][model_type]}`", "its loss": reason}
        for (kind, model_type), reason in WITH_LOGITS.items()
    ]
    parts = [
        f"{len(WITHOUT_LOGITS)} of {len(CASES)} types of transformers {transformers.__version__}:"
        " loss and gradients are those of the model without `patch_model`, and the logits of all tokens are never"
        " materialized.",
        "The others:",
        format_table(exceptions),
    ]
    return "\n\n".join(parts)


ALWAYS = {
    ("causal", "opt"),
    ("causal", "bart"),
    ("causal", "prophetnet"),
    ("seq2seq", "t5"),
    ("seq2seq", "fsmt"),
    ("masked", "bert"),
}


class Logits(TorchDispatchMode):
    """Detects tensors in memory with the shape of logits of at least half of the tokens."""

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


# A sum that is 0, as for a key's bias, leaves only rounding errors.
_assert_close = partial(assert_close, tolerance=1e-4, least=1e-2)


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
    _assert_close(step, expected)


# This model multiplies the output of an embedding in place.
@pytest.mark.parametrize(("kind", "model_type"), list(_cases({("causal", "ctrl")})))
def test_a_model_trains_the_same_with_the_functions_in_torch_s_place(kind, model_type):
    model = make(kind, model_type)
    inputs = batch(kind, model_type, model.config)
    expected, *_ = _step(model, inputs)
    with torch_aclnn_ops.patch():
        step, *_ = _step(model, inputs)
    _assert_close(step, expected)


@pytest.mark.parametrize(("kind", "model_type"), cases_of(*WARNINGS))
def test_where_the_loss_needs_the_logits_it_is_the_same_and_one_warning_says_why(kind, model_type):
    model = make(kind, model_type)
    inputs = batch(kind, model_type, model.config)
    expected, *_ = _step(model, inputs)
    step, _, warned = _step(patch_model(model, chunk_size=16), inputs)
    _assert_close(step, expected)
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
    assert put_between(written, TITLE, page()) == written, "run python -m tests.test_model_types"


if __name__ == "__main__":
    write_between(PAGE, TITLE, page())
