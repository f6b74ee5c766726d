"""Tiny configurations of every model type of transformers, derived from the names of their options."""

from typing import Any

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from transformers import PretrainedConfig

CLASSES = 512


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# For every type: options that make it tiny.
_SMALL = {
    **_each("vocab_size n_vocab decoder_vocab_size encoder_vocab_size text_vocab_size tgt_vocab_size", CLASSES),
    **_each("src_vocab_size vocab_size_per_layer_input entity_vocab_size shape_vocab_size", CLASSES),
    **_each("pronunciation_vocab_size encoder_hash_byte_group_vocab unpadded_vocab_size", CLASSES),
    **_each("hidden_size d_model n_embd dim emb_dim embed_dim word_embed_proj_dim embedding_size n_embed", 16),
    **_each("decoder_hidden_size encoder_hidden_size attention_hidden_size cross_attention_hidden_size", 16),
    **_each("model_dim hidden_dim output_dim out_hidden_size downsample_hidden_size hidden_size_per_layer_input", 16),
    **_each("hidden_size_global entity_emb_size projection_dim backbone_hidden_size output_proj_dims", 16),
    **_each("audio_hidden_size", 16),
    **_each("intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner feed_forward_size dim_ff", 16),
    **_each("moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size shared_intermediate_size", 16),
    **_each("expert_ffn_hidden_size dense_intermediate_size intermediate_size_mlp d_inner mlp_dim", 16),
    **_each("num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers", 2),
    **_each("num_decoder_layers num_blocks num_hidden_groups depth", 2),
    **_each("num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads", 2),
    **_each("num_encoder_attention_heads num_decoder_attention_heads num_key_value_heads index_n_heads", 2),
    **_each("head_dim d_kv attention_head_size kv_channels attention_head_dim index_head_dim rotary_dim", 8),
    **_each("qk_rope_head_dim qk_nope_head_dim v_head_dim q_lora_rank kv_lora_rank index_topk", 8),
    **_each("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
    **_each("num_experts_per_tok moe_k moe_topk num_experts_per_token", 2),
    **_each("n_group topk_group num_expert_group n_shared_experts", 1),
    **_each("mamba_n_heads mamba_num_heads linear_num_key_heads linear_num_value_heads", 4),
    **_each("mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state", 8),
    **_each("num_mel_bins", 8),
    **_each("max_position_embeddings n_positions seq_length max_sequence_length", 64),
    **_each("pad_token_id", 0),
    **_each("bos_token_id decoder_start_token_id", 1),
    **_each("eos_token_id sep_token_id", 2),
}

# By type: options that do not follow from the names above.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_LINEAR_AND_FULL = ["linear_attention", "full_attention"]
_TWO_HYBRIDS = {"attention_hidden_size": 32, "attention_head_dim": 16, "num_hidden_layers": 3}
_SWA = {"swa_head_dim": 8, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"linear_head_dim": 8, "linear_num_heads": 2},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"use_cache": False},
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots3_note_text": {"per_layer_config": {}},
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95, 0.0]},
    "git_vision_model": {"image_size": 16, "patch_size": 8},
    "granitemoehybrid": {"layer_types": _LINEAR_AND_FULL},
    "inkling2_loop_text": _SWA
    | {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "n_layers_per_attn_res_block": 1},
    "inkling2_text": _SWA,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "mimo_v2_flash": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mobilebert": {"embedding_size": 8},
    "nemotron_h": {"n_groups": 1},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 0},
    "omniasr_audio": {"conv_dim": (16,) * 7},
    "perceiver": {"num_latents": 8, "d_latents": 16, "num_self_attends_per_block": 2}
    | {**_each("num_self_attention_heads num_cross_attention_heads", 2), "max_position_embeddings": 32},
    "qwen4_exp_text": {**_each("indexer_n_heads indexer_head_dim indexer_budget", 8), "indexer_kv_heads": 1}
    | {"indexer_compress_ratio": 4},
    "reformer": {"axial_pos_shape": (4, 8), "axial_pos_embds_dim": (8, 8), "hash_seed": 0, "num_buckets": 4}
    | {"attn_layers": ("local", "lsh"), **_each("local_attn_chunk_length lsh_attn_chunk_length", 8)}
    | _each("hidden_dropout_prob local_attention_probs_dropout_prob", 0.0),
    "roc_bert": _each("pronunciation_embed_dim shape_embed_dim", 16),
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": (1,) * 7},
    "xlstm": {"use_cache": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": _TWO_HYBRIDS | {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": _TWO_HYBRIDS | {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny(config_class: type[PretrainedConfig], **more: Any) -> Any:
    """Return a tiny configuration of a class, with tiny inner configurations."""
    given = vars(config_class())
    options = {name: small for name, small in _SMALL.items() if name in given and _fits(given[name])}
    options |= _kinds_of_layers(given, options)
    if given.get("is_encoder_decoder"):
        options["decoder_start_token_id"] = 1
    for name, value in given.items():
        if isinstance(value, PretrainedConfig):
            options[name] = tiny(type(value)).to_dict()
    options |= _OF_TYPE.get(config_class.model_type, {}) | more
    for unneeded in (set(), {"head_dim"}, {"layer_types"}, {"head_dim", "layer_types"}):
        try:
            return config_class(**{name: one for name, one in options.items() if name not in unneeded})
        except Exception as error:
            reason = error
    raise reason


def _fits(value: Any) -> bool:
    return value is None or isinstance(value, int)


def _kinds_of_layers(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that give a model one layer of each kind, at least two in total."""
    lists = {
        name: list(dict.fromkeys(given[name]))
        for name in ("layer_types", "layers_block_type", "mlp_layer_types", "attention_layers", "block_types")
        if isinstance(given.get(name), (list, tuple))
    }
    layers = max([2, *map(len, lists.values())])
    numbers = {name: layers for name in ("num_hidden_layers", "n_layer", "n_layers") if name in options and lists}
    return numbers | {name: (kinds * layers)[:layers] for name, kinds in lists.items()}
