"""Tiny language models with random weights, the results of a training step, and losses defined by a program."""

from collections.abc import Callable
from contextlib import nullcontext

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from functools import partial

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax
from transformers.trainer_pt_utils import LabelSmoother

from tests._modes import Largest
from tests._tiny_configs import CLASSES, tiny

BATCH, TOKENS = 2, 64
LOGITS = BATCH * TOKENS * CLASSES
# Fewer than a step's rows, so that kernels that take all rows at once are detected.
CHUNK = 16

# Options of a tiny configuration other than the sizes, by model_type.
FAMILIES = {
    **dict.fromkeys(("llama", "qwen3", "mistral", "phi3", "gpt2", "olmo2", "deepseek_v3"), {}),
    "phi": {},  # its head has a bias
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
        for parameter in model.parameters():  # new models' logits are too small for a softcap to matter
            parameter.normal_(std=0.3)
    return model.train()


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Return tokens, and the same tokens as labels, some ignored."""
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
        torch.manual_seed(1)  # for dropout
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
    """Compare a model's original step with one after a patch, which must not materialize the logits of all tokens."""
    expected = Step(model, **call)
    patch(model)
    step = Step(model, **call)
    assert step.largest < LOGITS <= expected.largest
    assert_close(step, expected, tolerance)


def assert_close(step: Step, expected: Step, tolerance: float = 2e-5, least: float = 0.0) -> None:
    """Compare losses and gradients, each gradient relative to its largest element, or ``least`` of that of all."""
    assert step.loss.dtype == expected.loss.dtype and step.loss.shape == expected.loss.shape
    torch.testing.assert_close(step.loss, expected.loss, rtol=tolerance, atol=0)
    assert step.gradients.keys() == expected.gradients.keys()
    least *= max(one.abs().max() for one in expected.gradients.values())
    for name, gradient in step.gradients.items():
        wanted = expected.gradients[name]
        assert gradient.dtype == wanted.dtype
        assert (gradient - wanted).abs().max() <= tolerance * max(wanted.abs().max(), least), name


def _flattened(output, labels):
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return cross_entropy(output["logits"].flatten(0, 1).float(), shifted.flatten(), label_smoothing=0.1)


def _masked(output, labels):
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return cross_entropy(output[0][shifted != -100], shifted[shifted != -100])


def _of_log_probabilities(output, labels):
    targets = labels[:, 1:].clamp(min=0)
    log_probs = log_softmax(output.logits[:, :-1], dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -(log_probs * (labels[:, 1:] != -100)).mean()


LOSSES = {
    "rows": lambda output, labels: cross_entropy(output.logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1)),
    "flattened": _flattened,
    "a mask": _masked,
    "log-probabilities": _of_log_probabilities,
    "label smoothing of transformers": partial(LabelSmoother(0.1), shift_labels=True),
}


class WithOwnLoss(nn.Module):
    """A model that is called without labels, and the loss of its output."""

    def __init__(self, model: nn.Module, loss: str = "rows") -> None:
        super().__init__()
        self.model = model
        self.loss = LOSSES[loss]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return only the loss."""
        return {"loss": self.loss(self.model(input_ids), labels)}
