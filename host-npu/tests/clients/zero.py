"""DeepSpeed's ZeRO, and plain AdamW on the CPU: ``zero.py cpu``, or ``zero.py npu STAGE [offload]``.

The second half of the steps resumes from a checkpoint with a new engine.
"""

import os
import shutil
import sys
import tempfile

import torch
from _model import STEPS, model, rows, say

LEARNING_RATE = 1e-2
device, *options = sys.argv[1:]
batches = rows().split(4)
losses = []


def plain():
    """Train like DeepSpeed, without it."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    for batch in batches:
        loss = trained(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def engine(stage, offload):
    """Return a ZeRO engine with the initial weights."""
    import deepspeed

    zero = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": True}},
    }
    return deepspeed.initialize(model=(trained := model()), model_parameters=trained.parameters(), config=config)[0]


def train(trained, some):
    """Train on batches; every rank gets all of them, so the losses are those of one process."""
    for batch in some:
        batch = batch.to(trained.device)
        loss = trained(batch, labels=batch).loss
        trained.backward(loss)
        trained.step()
        losses.append(loss.item())


if device == "cpu":
    plain()
else:
    import deepspeed

    assert deepspeed.get_accelerator().device_name() == "npu"
    deepspeed.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    shared = [tempfile.mkdtemp()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(shared)
    first = engine(int(options[0]), "offload" in options)
    train(first, batches[: STEPS // 2])
    first.save_checkpoint(shared[0])
    second = engine(int(options[0]), "offload" in options)
    second.load_checkpoint(shared[0])
    train(second, batches[STEPS // 2 :])
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(shared[0])
if int(os.environ.get("RANK", "0")) == 0:
    say(losses)
