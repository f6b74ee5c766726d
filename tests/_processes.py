"""What processes do that fork, are killed, and end at bad moments, on a CPU or an NPU, for test_processes.py.

``python -m tests._processes PROGRAM DEVICE ...`` is a process whose interpreter ends in its own way.
"""

import atexit
import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn
from torch_aclnn_ops.optim import FusedEmaAdam

import torch

STEPS = 30
_CLASSES, _FEATURES = 40, 8


class Training:
    """A small model whose loss goes through every drop-in."""

    def __init__(self, device, **options):
        torch.manual_seed(0)
        self.device = device
        embedding, hidden = nn.Embedding(_CLASSES, _FEATURES), torch.nn.Linear(_FEATURES, _FEATURES)
        self.model = torch.nn.Sequential(embedding, hidden, torch.nn.Sigmoid()).to(device)
        self.optimizer = FusedEmaAdam(self.model.parameters(), lr=1e-2, ema_warmup="ratio", **options)
        self.losses = []

    def step(self):
        generator = torch.Generator().manual_seed(len(self.losses))
        tokens = torch.randint(_CLASSES, (17,), generator=generator).to(self.device)
        hidden = self.model(tokens[:-1])
        target = torch.rand(hidden.shape, generator=generator).to(self.device)
        loss = F.linear_cross_entropy(hidden, self.model[0].weight, tokens[1:])
        loss = loss + F.mse_loss(hidden, target) + F.binary_cross_entropy(hidden, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def steps(self, number):
        for _ in range(number):
            self.step()
        return self

    def contents(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
        }

    def load(self, path):
        contents = torch.load(path, map_location="cpu")
        self.model.load_state_dict(contents["model"])
        self.optimizer.load_state_dict(contents["optimizer"])
        self.losses = contents["losses"]


def train(device, path, layout, killed_after):
    """Train, save after every step, and resume from the file; the process is killed while a file is written."""
    path = Path(path)
    training = Training(device, flatten=layout == "flattened")
    if path.exists():
        training.load(path)
    while len(training.losses) < STEPS:
        training.step()
        with open(path.with_suffix(".new"), "wb") as file:
            if len(training.losses) == int(killed_after):
                file = _Killer(file)
            torch.save(training.contents(), file)
        os.replace(path.with_suffix(".new"), path)


class _Killer:
    """A file that ends the process in the middle of what is written to it."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        self.file.write(data)
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def flush(self):
        pass


def spawn(device):
    """Train in this process, then as far in a new one."""
    here = Training(device).steps(3)
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_train_in_another, args=(device, queue))
    process.start()
    there = queue.get()
    process.join()
    print(json.dumps([process.exitcode, here.losses, there]))


def _train_in_another(device, queue):
    queue.put(Training(device).steps(3).losses)


def fork_and_train(device):
    """Train on, after a fork, in both processes."""
    training = Training(device).steps(3)
    [there] = _forked([lambda: training.steps(3).losses])
    return training.steps(3).losses, there


def load_batches(device):
    """Let processes that are forked after use make the batches, as DataLoader does."""
    training = Training(device).steps(3)
    loader = torch.utils.data.DataLoader(
        list(range(8)), 4, num_workers=1, multiprocessing_context="fork", collate_fn=_batch
    )
    batches = [batch.to(device).sum().item() for batch in loader]
    training.steps(1)
    return batches


def _batch(numbers):
    numbers = torch.tensor(numbers, dtype=torch.float32)
    return F.mse_loss(numbers, numbers + numbers, reduction="none")


def fork_and_use_the_device(device):
    """Say what a forked process gets from the device that its parent has used, and what the parent gets then."""
    training = Training(device).steps(3)
    weight = training.model[0].weight
    calls = [
        lambda: torch.ones(2, device=device),
        lambda: weight + 1,
        lambda: F.mse_loss(weight, weight.detach()),
        lambda: torch.ops.torch_aclnn_ops.mse_loss_backward(*[weight.detach()] * 3, 1),
        training.optimizer.step,
        training.step,
        F.mse_loss(torch.ones(2, requires_grad=True), torch.ones(2)).backward,
    ]
    forked = _forked(calls)
    return forked, training.steps(3).losses == Training(device).steps(6).losses


def _forked(calls):
    """Make each call in a separate forked process; return its result or exception."""
    results = []
    for call in calls:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            signal.alarm(20)  # ends a process that hangs
            try:
                result = call()
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            os.write(writer, json.dumps(result, default=repr).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as file:
            results.append(json.loads(file.read() or '"it hangs"'))
        os.waitpid(child, 0)
    return results


def end_with_work_queued(device, way):
    """End while the device has minutes of work to do."""
    training = Training(device).steps(2)
    factor = torch.eye(1000, device=device)
    for _ in range(5):
        factor = factor @ factor
    # What follows waits for the products. No backward: a thread of torch's engine may drop its last Python object late.
    training.model[0].weight.data.add_(factor[0, 0])
    training.model[0].weight.grad = F.mse_loss(factor, factor.t()).expand_as(training.model[0].weight).clone()
    training.optimizer.step()
    print("the end", flush=True)
    if way == "exception":
        raise ValueError("unhandled")
    if way == "exit":
        sys.exit(3)


def end_with_daemon_threads(device):
    """Exit while daemon threads are training, which are stopped when the interpreter exits."""
    stop, started = threading.Event(), threading.Barrier(3)

    def train():
        training = Training(device)
        started.wait()
        while not stop.is_set():
            training.step()

    threads = [threading.Thread(target=train, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()

    @atexit.register
    def join():
        stop.set()
        for thread in threads:
            thread.join()

    started.wait()
    print("the end", flush=True)


def end_with_idle_daemon_threads(device):
    """End while daemon threads that have trained wait for more."""
    idle = threading.Barrier(3)

    def train():
        training = Training(device).steps(2)
        idle.wait()
        threading.Event().wait()
        training.step()

    for _ in range(2):
        threading.Thread(target=train, daemon=True).start()
    idle.wait()
    print("the end", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
