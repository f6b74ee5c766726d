"""Tiny language models of transformers with random weights, and what a training step finds."""

from collections.abc import Callable
from contextlib import nullcontext

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
import torch
import transformers
from torch import Tensor

from tests._modes import Largest
from tests._tiny_configs import CLASSES, tiny

BATCH, TOKENS = 2, 64
LOGITS = BATCH * TOKENS * CLASSES
# Fewer than a step's rows, so that kernels which take all rows at once would show.
CHUNK = 16

# By model_type: what a tiny configuration has besides the sizes.
FAMILIES = {
    **dict.fromkeys(("llama", "qwen3", "mistral", "phi3", "gpt2", "olmo2", "deepseek_v3"), {}),
    "phi": {},  # whose head has a bias
    "qwen2": {"tie_word_embeddings": True},
    **dict.fromkeys(("qwen3_moe", "mixtral"), {"output_router_logits": True}),
    **dict.fromkeys(("gemma2", "gemma3_text"), {"final_logit_softcapping": 0.5}),
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
}


def make(family: str = "llama", **options: object) -> transformers.PreTrainedModel:
    """Return a model in training mode, always with the same weights."""
    torch.manual_seed(0)
    config = tiny(transformers.CONFIG_MAPPING[family], **{**FAMILIES[family], **options})
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


PROCESSES = 2


def share(rank: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return the rows of one of the processes."""
    return {name: one.chunk(PROCESSES)[rank].to(device) for name, one in batch().items()}


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


def assert_patched(model: torch.nn.Module, patch: Callable[..., object], tolerance: float = 2e-5, **call: object):
    """Compare a step of a model as it was with one after a patch, without the logits of all tokens."""
    expected = Step(model, **call)
    patch(model)
    step = Step(model, **call)
    assert step.largest < LOGITS <= expected.largest
    assert_close(step, expected, tolerance)


def assert_close(step: Step, expected: Step, tolerance: float = 2e-5) -> None:
    """Compare losses and gradients, each gradient by the size of its largest element."""
    assert step.loss.dtype == expected.loss.dtype and step.loss.shape == expected.loss.shape
    torch.testing.assert_close(step.loss, expected.loss, rtol=tolerance, atol=0)
    assert step.gradients.keys() == expected.gradients.keys()
    for name, gradient in step.gradients.items():
        wanted = expected.gradients[name]
        assert gradient.dtype == wanted.dtype
        assert (gradient - wanted).abs().max() <= tolerance * wanted.abs().max(), name
