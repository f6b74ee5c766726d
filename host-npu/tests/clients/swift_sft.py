"""ms-swift's ``swift sft`` with LoRA on a file of conversations: ``swift_sft.py cpu|npu``."""

import json
import sys
import tempfile
from pathlib import Path

from _model import STEPS, model, rows, say, text, tokenizer

device = sys.argv[1]
with tempfile.TemporaryDirectory() as folder:
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    data = Path(folder, "data.jsonl")
    with data.open("w") as file:
        for row in rows().tolist():
            said = [{"role": "user", "content": text(row[:4])}, {"role": "assistant", "content": text(row[4:])}]
            file.write(json.dumps({"messages": said}) + "\n")
    from swift import SftArguments, sft_main

    found = sft_main(SftArguments(
        model=folder, model_type="llama", template="dummy", dataset=[str(data)], max_steps=STEPS, logging_steps=1,
        tuner_type="lora", torch_dtype="float32", per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        output_dir=f"{folder}/output", split_dataset_ratio=0.0, lora_dropout=0.0, dataloader_num_workers=0,
        check_model=False, dataset_num_proc=1, fp16=False, bf16=False, use_cpu=device == "cpu",
    ))  # fmt: skip
print({key: value for key, value in found.items() if key != "log_history"})
say(entry["loss"] for entry in found["log_history"] if "loss" in entry)
