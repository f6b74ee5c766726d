"""transformers' Trainer: ``trainer.py cpu|npu [sdpa|flash_attention_2|eager] [lora]``."""

import sys
import tempfile

from _model import STEPS, model, rows, say
from transformers import Trainer, TrainingArguments

device, attention, *adapters = sys.argv[1:]
trained = model(attn_implementation="sdpa" if device == "cpu" else attention)
if attention == "flash_attention_2":
    trained = trained.bfloat16()
if adapters:
    from peft import LoraConfig, get_peft_model

    trained = get_peft_model(trained, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0))
data = [{"input_ids": row, "labels": row} for row in rows()]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2, report_to=[],
        use_cpu=device == "cpu", save_steps=STEPS // 2, eval_strategy="steps", eval_steps=STEPS,
    )  # fmt: skip
    trainer = Trainer(trained, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    assert trainer.model.device.type == device, trainer.model.device
    # Resumes from the checkpoint in the middle, as after a restart.
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
say(entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry)
