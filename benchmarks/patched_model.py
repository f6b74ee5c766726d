"""A step of training and one of evaluation of a model of transformers, as it is and patched: time and memory.

``python -m benchmarks.patched_model`` takes a Llama of one layer, whose head is most of what a step costs. Adapters are
those of LoRA on a frozen head; evaluation is patched with ``eval_logits=False``.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from torch_aclnn_ops.integrations.transformers import patch_model

import torch

from benchmarks._harness import OURS, compare, parser, run
from benchmarks._results import Row

_TOKENS, _QUICK_TOKENS, _SEQUENCES = 512, 32, 4
_CLASSES, _QUICK_CLASSES, _FEATURES = 32000, 1000, 256


def _model(classes: int, has_adapters: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=classes,
        hidden_size=_FEATURES,
        intermediate_size=_FEATURES,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    if not has_adapters:
        return LlamaForCausalLM(config)
    from peft import LoraConfig, get_peft_model

    return get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=["lm_head"]))


def _calls(tokens: torch.Tensor, classes: int, step: str) -> Iterator[tuple[str, Callable[[], None]]]:
    for by in ("transformers", OURS):
        model = _model(classes, has_adapters=step == "adapters").train(step != "evaluation")
        if by == OURS:
            patch_model(model, eval_logits=False)

        def call(model: Any = model) -> None:
            with torch.set_grad_enabled(model.training):
                loss = model(tokens, labels=tokens).loss
            if model.training:
                loss.backward()

        yield by, call


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare the steps."""
    length, classes = (_QUICK_TOKENS, _QUICK_CLASSES) if options.quick else (_TOKENS, _CLASSES)
    tokens = torch.randint(classes, (_SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    rows = []
    for step in ("training", "adapters", "evaluation"):
        configuration = f"{step}, {_SEQUENCES} sequences of {length} tokens, {_FEATURES} features, {classes} classes"
        rows += compare(
            dict(_calls(tokens, classes, step)),
            options.rounds,
            least_bytes=0,
            operator="linear_cross_entropy",
            configuration=configuration,
        )
    return rows


if __name__ == "__main__":
    run("patched_model", measure, parser(__doc__).parse_args(), rounds=5)
