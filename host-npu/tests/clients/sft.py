"""TRL's SFTTrainer on a conversation of tokens: ``sft.py cpu|npu``."""

import sys
import tempfile

from _model import STEPS, model, rows, say, tokenizer
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

device = sys.argv[1]
data = Dataset.from_dict({"input_ids": rows().tolist()})
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2, report_to=[],
        use_cpu=device == "cpu", bf16=False, packing=False,
    )  # fmt: skip
    trainer = SFTTrainer(model(), arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
assert trainer.model.device.type == device, trainer.model.device
say(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
