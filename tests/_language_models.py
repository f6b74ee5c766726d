"""Tiny language models of transformers with random weights, and what a training step finds."""

from contextlib import nullcontext

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, TOKENS, CLASSES = 2, 64, 512
LOGITS = BATCH * TOKENS * CLASSES
# Fewer than a step's rows, so that kernels which take all rows at once would show.
CHUNK = 16

_SIZES = {
    "vocab_size": CLASSES,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

# By model_type: what a tiny configuration has besides the sizes.
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "output_router_logits": True},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "gemma2": {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "phi": {},  # whose head has a bias
    "phi3": {},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "olmo2": {},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "deepseek_v3": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "head_dim": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}


def make(family: str = "llama", **options: object) -> transformers.PreTrainedModel:
    """Return a model in training mode, always with the same weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family], **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # the logits of new models are too small for a softcap to matter
            parameter.normal_(std=0.3)
    return model.train()


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Return tokens, and as labels the same, some ignored."""
    tokens = torch.randint(3, CLASSES, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[0, 5:9] = -100
    return {"input_ids": tokens, "labels": labels}


class Largest(TorchDispatchMode):
    """Sees the results of operators, and how many elements the largest has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        # Tensors on "meta" have no memory, and torch_npu's attention makes a causal mask of 2048 x 2048.
        sizes = [one.numel() for one in made if not one.is_meta and one.dtype != torch.bool]
        self.elements = max([self.elements, *sizes])
        return result


class Step:
    """A forward and a backward pass: the loss, the gradients, and the elements of the largest tensor if measured."""

    def __init__(self, model: torch.nn.Module, measured: bool = True, **call: object) -> None:
        torch.manual_seed(1)  # of dropout
        model.zero_grad()
        largest = Largest()
        with largest if measured else nullcontext():
            self.output = model(**(call or batch()))
            self.loss = self.output["loss"]
            self.loss.backward()
        self.loss = self.loss.detach()
        self.largest = largest.elements
        self.gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_close(step: Step, expected: Step, tolerance: float = 2e-5) -> None:
    """Compare losses and gradients, each gradient by the size of its largest element."""
    assert step.loss.dtype == expected.loss.dtype and step.loss.shape == expected.loss.shape
    torch.testing.assert_close(step.loss, expected.loss, rtol=tolerance, atol=0)
    assert step.gradients.keys() == expected.gradients.keys()
    for name, gradient in step.gradients.items():
        wanted = expected.gradients[name]
        assert gradient.dtype == wanted.dtype
        assert (gradient - wanted).abs().max() <= tolerance * wanted.abs().max(), name
