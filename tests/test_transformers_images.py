"""patch_model with models that read images or sound, and put them among the tokens of a language model."""

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations.transformers import patch_model

import pytest
import torch
import transformers

from tests._language_models import BATCH, CHUNK, CLASSES, TOKENS, Step, assert_close

IMAGE, VIDEO, START, END = 5, 6, 7, 8  # special tokens
PLACES = 4  # of an image among the tokens
_LAYERS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_LAYERS, "vocab_size": CLASSES, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
_TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
_VISION = {**_LAYERS, "image_size": 16, "patch_size": 8}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_GRIDS = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
}
_GRIDS |= {"out_hidden_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
_IMAGES = {"pixel_values": (BATCH, 3, 16, 16)}
_PATCHES = {"pixel_values": (BATCH * 16, 3 * 2 * 4 * 4)}

# The options of a tiny configuration, and the shapes of the inputs besides tokens.
MODELS = {
    "Blip2": (
        {
            "text_config": {**_TEXT, "model_type": "opt", "ffn_dim": 16, "word_embed_proj_dim": 16},
            "vision_config": _VISION,
            "qformer_config": {**_LAYERS, "encoder_hidden_size": 16, "vocab_size": 50},
            "num_query_tokens": PLACES,
        },
        _IMAGES,
    ),
    "Gemma3": ({"text_config": _TEXT, "vision_config": _VISION, "mm_tokens_per_image": PLACES}, _IMAGES),
    "Idefics3": (
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_VISION, "patch_size": 4},
            "scale_factor": 2,
        },
        {"pixel_values": (BATCH, 1, 3, 16, 16)},
    ),
    "InternVL": (
        {"text_config": {**_TEXT, "model_type": "qwen2"}, "vision_config": {**_VISION, "patch_size": [4, 4]}},
        _IMAGES,
    ),
    "Llava": ({"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _VISION}, _IMAGES),
    "Qwen2_5_VL": (
        {
            "text_config": {**_TEXT, **_MROPE},
            "vision_config": {**_GRIDS, "fullatt_block_indexes": [1], "window_size": 16},
        },
        _PATCHES,
    ),
    "Qwen3VL": ({"text_config": {**_TEXT, **_MROPE}, "vision_config": _GRIDS}, _PATCHES),
    "Whisper": (
        {
            **{"vocab_size": CLASSES, "d_model": 16, "num_mel_bins": 8, "max_source_positions": 16},
            **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
            **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
            **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 16),
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        },
        {"input_features": (BATCH, 8, 32)},
    ),
}


def _make(name, options):
    torch.manual_seed(0)
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    tokens = {} if name == "Whisper" else {**tokens, "image_token_index": IMAGE, "vision_end_token_id": END}
    config = getattr(transformers, f"{name}Config")(**options, **tokens)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.float().train()


def _inputs(name, shapes):
    generator = torch.Generator().manual_seed(0)
    given = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    tokens = torch.randint(10, CLASSES, (BATCH, TOKENS), generator=generator)
    labels = tokens.clone()
    labels[0, 20:] = -100
    if name == "Whisper":
        return {**given, "labels": labels}
    tokens[:, 2], tokens[:, 3 : 3 + PLACES] = START, IMAGE
    labels[:, : 3 + PLACES] = -100
    given |= {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
    if name == "Gemma3":
        given["token_type_ids"] = (tokens == IMAGE).int()
    if shapes is _PATCHES:
        given["mm_token_type_ids"] = (tokens == IMAGE).int()
        given["image_grid_thw"] = torch.tensor([[1, 4, 4]] * BATCH)
    return given


@pytest.mark.parametrize(("name", "options", "shapes"), [(name, *one) for name, one in MODELS.items()], ids=MODELS)
def test_a_model_of_images_or_sound_has_the_same_loss_without_logits(name, options, shapes):
    model, inputs = _make(name, options), _inputs(name, shapes)
    expected = Step(model, measured=False, **inputs)
    step = Step(patch_model(model, chunk_size=CHUNK), measured=False, **inputs)
    assert isinstance(step.output.logits, LazyLogits) and not step.output.logits.is_materialized
    assert_close(step, expected, 1e-4, least=1e-2)
