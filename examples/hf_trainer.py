"""Train a small Llama on the Python standard library with Hugging Face's Trainer, this package's loss and EMA weights.

Run ``python examples/hf_trainer.py --steps 200`` from a checkout, with ``pip install "transformers>=5" accelerate``;
``--resume`` continues from the last checkpoint.
"""

import argparse
import sys
from pathlib import Path

from torch_aclnn_ops.integrations.transformers import EmaCallback, patch_model
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from arguments import whole_number_from
from devices import DEVICES, DeviceUnavailableError, open_device
from text_data import VOCABULARY_SIZE, load_text_data, unigram_cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VALIDATION_WINDOWS = 32


class Windows(torch.utils.data.Dataset):
    """Evenly spaced windows of a text; the labels are the same tokens."""

    def __init__(self, tokens: torch.Tensor, context: int, windows: int) -> None:
        starts = torch.arange(windows) * (len(tokens) - context) // windows
        self.rows = tokens[starts[:, None] + torch.arange(context)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_model(width: int, context: int) -> LlamaForCausalLM:
    """Return a Llama with random weights, whose training loss never materializes the logits of all tokens."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    return patch_model(LlamaForCausalLM(config))


def make_trainer(options: argparse.Namespace) -> tuple[Trainer, float]:
    """Return the trainer, and the loss of a model that only knows the frequency of each token."""
    torch.manual_seed(options.seed)
    data = load_text_data(options.output / "cache")
    arguments = TrainingArguments(
        str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        eval_strategy="steps",
        eval_steps=max(options.steps // 4, 1),
        save_steps=max(options.steps // 4, 1),
        logging_steps=max(options.steps // 20, 1),
        lr_scheduler_type="cosine",
        warmup_steps=max(options.steps // 10, 1),
        seed=options.seed,
        use_cpu=options.device == "cpu",
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        make_model(options.width, options.context),
        arguments,
        train_dataset=Windows(data.training, options.context, options.steps * options.batch_size),
        eval_dataset=Windows(data.validation, options.context, VALIDATION_WINDOWS),
        optimizer_cls_and_kwargs=(FusedEmaAdam, {"lr": options.lr, "ema_decay": 0.99, "ema_warmup": "ratio"}),
    )
    trainer.add_callback(EmaCallback(trainer))
    return trainer, unigram_cross_entropy(data.training, data.validation)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="Train a small Llama with Hugging Face's Trainer.")
    number = whole_number_from(1)
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where to train (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/hf_trainer"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=number, default=200, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=number, default=8, help="(default: %(default)s)")
    parser.add_argument("--context", type=number, default=128, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--width", type=number, default=128, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=whole_number_from(0), default=0, help="(default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    options = parser.parse_args(argv)
    try:
        open_device(options.device)
    except DeviceUnavailableError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    trainer, unigram = make_trainer(options)
    trainer.train(resume_from_checkpoint=options.resume)
    averaged = trainer.evaluate()["eval_loss"]
    print(
        "Shown: the Trainer of transformers trains without the logits of all tokens, and evaluates EMA weights:"
        f"\nvalidation loss {averaged:.4f} with EMA weights, {unigram:.4f} by frequency alone."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
