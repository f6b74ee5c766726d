"""TRL's GRPOTrainer, which generates with the model and rewards the completions: ``grpo.py cpu|npu``."""

import sys
import tempfile

import torch
from _model import STEPS, model, rows, say, text, tokenizer
from datasets import Dataset
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from trl import GRPOConfig, GRPOTrainer


class Noise(LogitsProcessor):
    """Gumbel noise drawn on the CPU: the token with the largest sum is a sample, the same on every device."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, input_ids, scores):
        uniform = torch.rand(scores.shape, generator=self.generator)
        return scores - uniform.log().neg().log().to(scores.device)


class Model(LlamaForCausalLM):
    """A model that samples with noise drawn on the CPU."""

    noise = Noise()

    def generate(self, *arguments, **options):
        return super().generate(*arguments, logits_processor=LogitsProcessorList([self.noise]), **options)


def even_words(completion_ids, **_):
    """Return the fraction of even words in each completion."""
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


device = sys.argv[1]
prompts = [text(row) for row in rows()[:, :4].tolist()]
with tempfile.TemporaryDirectory() as folder:
    arguments = GRPOConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=8, num_generations=4, num_iterations=2, beta=0.1,
        max_completion_length=8, top_k=1, logging_steps=1, learning_rate=1e-2, report_to=[], use_cpu=device == "cpu",
        bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    model().save_pretrained(f"{folder}/start")
    trained = Model.from_pretrained(f"{folder}/start")
    data = Dataset.from_dict({"prompt": prompts})
    trainer = GRPOTrainer(trained, even_words, arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
assert trainer.model.device.type == device, trainer.model.device
steps = [entry for entry in trainer.state.log_history if "reward" in entry]
# The loss of the first pass over samples is a rounded 0; its gradient is not.
say(entry[key] for entry in steps for key in ("reward", "grad_norm"))
