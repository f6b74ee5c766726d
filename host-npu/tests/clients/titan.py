"""torchtitan's own training of its smallest Llama: ``titan.py RANKS [options of torchtitan]``.

Every run starts from the seed checkpoint, which torchtitan writes on one rank, and uses the same batches: its losses
are those of one rank, however the model is sharded.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from _model import rows, say, text, tokenizer

_CONFIG = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "tests/assets/tokenizer"
[optimizer]
lr = 8e-4
[training]
local_batch_size = 4
seq_len = 64
steps = 4
dataset = "c4_test"
mixed_precision_param = "float32"
[metrics]
log_freq = 1
[checkpoint]
enable = true
load_only = true
[debug]
seed = 1
"""


def train(ranks, *options):
    """Return torchtitan's log."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks)
    command = (sys.executable, *torchrun, "-m", "torchtitan.train", "--job.config_file", "config.toml", *options)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout)
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


ranks, *options = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    tokenizer().save_pretrained("tests/assets/tokenizer")
    Path("tests/assets/c4_test").mkdir()
    lines = [json.dumps({"text": text(row)}) for row in rows(400).tolist()]
    Path("tests/assets/c4_test/data.json").write_text("\n".join(lines))
    Path("config.toml").write_text(_CONFIG)
    train("1", "--checkpoint.create_seed_checkpoint", "--checkpoint.no-load-only")
    log = train(ranks, *options)
steps = dict(re.findall(r"step: +(\d+) +loss: +([\d.]+)", log))
say(steps.values())
