"""A step of TRL's DPOTrainer, as it is and with the head of linear_cross_entropy: time and memory.

``python -m benchmarks.trl`` compares forward and backward passes of one batch of four sequences, whose policy and
reference are Llamas of one layer: the head is most of what they cost, as the memory of the head is in larger ones.
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

from torch_aclnn_ops.integrations.trl import patch_trainer, unpatch_trainer

import torch

from benchmarks._harness import OURS, compare, parser, run
from benchmarks._results import Row

_TOKENS, _QUICK_TOKENS, _PAIRS = 512, 64, 2
_CLASSES, _QUICK_CLASSES, _FEATURES = 32000, 1000, 64


def _trainer(folder: str, tokens: int, classes: int) -> Any:
    """Make a DPOTrainer of random sequences, half of whose tokens are the prompt."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    words = {word: number for number, word in enumerate(["[PAD]", "[EOS]", *map(str, range(classes - 2))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]")
    config = LlamaConfig(
        vocab_size=classes,
        hidden_size=_FEATURES,
        intermediate_size=2 * _FEATURES,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    sequences = torch.randint(classes - 2, (3 * _PAIRS, tokens // 2)).tolist()
    texts = [" ".join(map(str, sequence)) for sequence in sequences]
    rows = [
        {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}
        for prompt, chosen, rejected in zip(*[iter(texts)] * 3, strict=True)
    ]
    args = DPOConfig(
        folder,
        per_device_train_batch_size=_PAIRS,
        max_length=2 * tokens,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
    )
    return DPOTrainer(
        LlamaForCausalLM(config),
        LlamaForCausalLM(config),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def _calls(trainer: Any) -> dict[str, Callable[[], object]]:
    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()
    model.zero_grad(set_to_none=False)

    def step() -> None:
        unpatch_trainer(trainer)
        trainer.compute_loss(model, dict(batch)).backward()

    def patched_step() -> None:
        patch_trainer(trainer)
        trainer.compute_loss(model, dict(batch)).backward()

    return {"TRL": step, OURS: patched_step}


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare the steps."""
    tokens, classes = (_QUICK_TOKENS, _QUICK_CLASSES) if options.quick else (_TOKENS, _CLASSES)
    configuration = f"{2 * _PAIRS} sequences of {tokens} tokens, {_FEATURES} features, {classes} classes"
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(folder, tokens, classes)
        return compare(
            _calls(trainer),
            options.rounds,
            least_bytes=0,
            operator="linear_cross_entropy",
            configuration=configuration,
        )


if __name__ == "__main__":
    run("trl", measure, parser(__doc__).parse_args(), rounds=5)
