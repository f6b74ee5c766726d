"""Steps of models of transformers and of TRL's DPOTrainer, as they are and patched: time and memory.

``python -m benchmarks.integrations`` uses Llamas with one layer, whose head takes most of a step. A model of
transformers is trained, trained with LoRA adapters on a frozen head, and evaluated with ``eval_logits=False``; the
DPOTrainer computes the loss of one batch of four sequences, and its gradients.
"""

import argparse
import tempfile
from typing import Any

from torch_aclnn_ops.integrations.transformers import patch_model
from torch_aclnn_ops.integrations.trl import patch_trainer, unpatch_trainer

import torch

from benchmarks._harness import OURS, Call, compare, parser, run
from benchmarks._results import Row

_SEQUENCES = 4
_SIZES, _QUICK_SIZES = (512, 32000), (64, 1000)  # tokens of a sequence, classes
_FEATURES, _FEATURES_OF_DPO = 256, 64


def _llama(classes: int, features: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": features, "intermediate_size": max(features, 128), "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=classes, num_hidden_layers=1, **sizes))


def _step(kind: str, is_patched: bool, tokens: torch.Tensor, classes: int) -> Call:
    model = _llama(classes, _FEATURES)
    if kind == "adapters":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    model.train(kind != "evaluation")
    if is_patched:
        patch_model(model, eval_logits=False)

    def step() -> None:
        with torch.set_grad_enabled(model.training):
            loss = model(tokens, labels=tokens).loss
        if model.training:
            loss.backward()

    return step


def _dpo_trainer(folder: str, tokens: int, classes: int) -> Any:
    """Return a DPOTrainer for random sequences, half of whose tokens are the prompt."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    words = {word: number for number, word in enumerate(["[PAD]", "[EOS]", *map(str, range(classes - 2))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = [
        " ".join(map(str, one))
        for one in torch.randint(classes - 2, (_SEQUENCES // 2, 3, tokens // 2)).flatten(0, 1).tolist()
    ]
    pairs = zip(*[iter(texts)] * 3, strict=True)
    rows = [{"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {other}"} for prompt, chosen, other in pairs]
    options = {"per_device_train_batch_size": _SEQUENCES // 2, "max_length": 2 * tokens, "report_to": []}
    return DPOTrainer(
        *(_llama(classes, _FEATURES_OF_DPO) for _ in range(2)),
        args=DPOConfig(folder, bf16=False, gradient_checkpointing=False, use_cpu=True, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]"),
    )


def _steps_of_dpo(trainer: Any) -> dict[str, Call]:
    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()
    model.zero_grad(set_to_none=False)

    def step() -> None:
        trainer.compute_loss(model, dict(batch)).backward()

    def their_step() -> None:
        unpatch_trainer(trainer)
        step()

    def our_step() -> None:
        patch_trainer(trainer)
        step()

    return {"TRL": their_step, OURS: our_step}


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare the steps."""
    length, classes = _QUICK_SIZES if options.quick else _SIZES
    tokens = torch.randint(classes, (_SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    sizes = f"{_SEQUENCES} sequences of {length} tokens, {{}} features, {classes} classes"
    columns = {"least_bytes": 0, "operator": "linear_cross_entropy"}
    rows = []
    for kind in ("training", "adapters", "evaluation"):
        calls = {by: _step(kind, by == OURS, tokens, classes) for by in ("transformers", OURS)}
        rows += compare(calls, options.rounds, configuration=f"{kind}, {sizes.format(_FEATURES)}", **columns)
    with tempfile.TemporaryDirectory() as folder:
        calls = _steps_of_dpo(_dpo_trainer(folder, length, classes))
        rows += compare(calls, options.rounds, configuration=sizes.format(_FEATURES_OF_DPO), **columns)
    return rows


if __name__ == "__main__":
    run("integrations", measure, parser(__doc__).parse_args(), rounds=5)
