"""sentence-transformers' trainer with in-batch negatives: ``sentences.py cpu|npu``."""

import sys
import tempfile

from _model import STEPS, model, rows, say, text, tokenizer
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer

device = sys.argv[1]
pairs = [{"anchor": text(row[:8]), "positive": text(row[8:])} for row in rows().tolist()]
with tempfile.TemporaryDirectory() as folder:
    model().model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    body = Transformer(folder)
    encoder = SentenceTransformer(modules=[body, Pooling(32)], device="cpu" if device == "cpu" else None)
    arguments = SentenceTransformerTrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-3, report_to=[],
        use_cpu=device == "cpu", save_strategy="no",
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        encoder, arguments, Dataset.from_list(pairs), loss=MultipleNegativesRankingLoss(encoder)
    )
    trainer.train()
assert encoder.device.type == device, encoder.device
say(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
say(encoder.encode([pair["anchor"] for pair in pairs[:4]]).std(1))
