"""Every type of language model that transformers has, and what patch_model does to its loss.

``python -m tests.model_types`` writes it to docs/works_with.md; tests/test_model_types.py runs it.
"""

import copy
from pathlib import Path

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from benchmarks._figures import write_between
from benchmarks._results import format_table
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
    """Return a model in training mode, always with the same weights, which are so large that softcaps matter."""
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
    """Return the class of a type's models."""
    return getattr(transformers, KINDS[kind][model_type])


def batch(kind: str, model_type: str, config: transformers.PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return tokens, and as labels others or the same, some ignored; and what else a type needs."""
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
NO_LINEAR = "`patch_model` raises: the head is not a linear layer"
STACKED = "`patch_model` warns: the logits of several heads are stacked before the loss"
WEIGHTS = "`patch_model` warns: the model multiplies by the head's weights itself, together with others"
# What a warning says, by the sentence of the page.
WARNINGS = {STACKED: "stack needs them", WEIGHTS: "was not called as a linear layer"}
WITH_LOGITS = {
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
    """Return the cases that have one of these reasons."""
    return [case for case, reason in WITH_LOGITS.items() if reason in reasons]


def page() -> str:
    """Return what the page says: how many types there are, and a table of the exceptions."""
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


if __name__ == "__main__":
    write_between(PAGE, TITLE, page())
