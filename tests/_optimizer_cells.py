"""FusedEmaAdam as one of several processes, for test_optimizer_matrix.py."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch_aclnn_ops.optim import FusedEmaAdam, unwrap

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from host_npu.testing import results_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests import _optimizer_reference as reference

TP_SIZE = 2
PLAN = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "a": ColwiseParallel(output_layouts=Replicate()),
    "b": ColwiseParallel(output_layouts=Replicate()),
}


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with the shards of all processes, on the CPU."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()


def shard(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Training:
    """A model and its optimizer in one of the processes that train together.

    Args:
        way: The distribution.
        feature: The feature of the parameters or the optimizer.
        device: "cpu" or "npu".
        seed: The seed of the initial weights.
    """

    def __init__(self, way: str, feature: str, device: str, seed: int = 0) -> None:
        self.way, self.feature, self.device = way, feature, device
        self.is_sharded = way.startswith("FSDP2")
        self.dp_rank, self.dp_size = dist.get_rank(), dist.get_world_size()
        self.model = reference.make_model(feature, device, seed)
        self.wrapped: nn.Module = self.model
        self.optimizer: Any = None
        if way == "FSDP2 and TP":
            self._parallelize()
        elif self.is_sharded:
            self._shard()
        elif way != "one process":
            self.wrapped = DistributedDataParallel(self.model)
        # Kept, because FSDP2 exposes other parameters between a forward pass and the next backward pass.
        self.params = dict(self.model.named_parameters())
        self.scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2, enabled=feature == "GradScaler")
        with self.moves_nothing_if_it_raises():
            self.optimizer = self._make_optimizer()

    def _parallelize(self) -> None:
        mesh = init_device_mesh(self.device, (self.dp_size // TP_SIZE, TP_SIZE), mesh_dim_names=("dp", "tp"))
        parallelize_module(self.model, mesh["tp"], PLAN)
        if self.feature == "tied by module":
            self.model.b.weight = self.model.a.weight  # tie again: each module got its own parameter
        self.dp_rank, self.dp_size = mesh["dp"].get_local_rank(), mesh["dp"].size()
        self._shard(mesh=mesh["dp"])

    def _shard(self, **options: Any) -> None:
        for layer in (self.model.up, self.model.down):
            fully_shard(layer, **options)
        fully_shard(self.model, **options)

    def _make_optimizer(self) -> Any:
        options = {**reference.OPTIONS, "ema_decay": reference.EMA_DECAY, "ema_warmup": "ratio"}
        options["flatten"] = self.feature == "flatten"
        if self.feature == "tensor lr":
            options["lr"] = torch.tensor(reference.OPTIONS["lr"], device=self.device)
        if self.way == "ZeRO":
            return ZeroRedundancyOptimizer(self.model.parameters(), FusedEmaAdam, **options)
        return FusedEmaAdam(self.model.parameters(), **options)

    def _contents(self) -> list[Tensor]:
        """Return copies of all weights and states of this process."""
        tensors = list(self.params.values())
        if self.optimizer is not None:
            tensors += [value for state in self._states().values() for value in state.values()]
        return [shard(tensor.detach()).clone() for tensor in tensors]

    def _states(self) -> Any:
        """Return the states of this process."""
        return self.optimizer.optim.state if self.way == "ZeRO" else self.optimizer.state

    @contextmanager
    def moves_nothing_if_it_raises(self) -> Iterator[None]:
        """Add a note to an exception if weights or states have changed."""
        before = self._contents()
        try:
            yield
        except Exception as error:
            after = self._contents()
            if len(before) != len(after) or not all(map(torch.equal, before, after)):
                raise AssertionError("weights or states have moved before the exception") from error
            raise

    def train(self, steps: Iterable[int]) -> None:
        """Train on this process's share of each batch."""
        for step in steps:
            self.optimizer.zero_grad()
            shares = [part.chunk(self.dp_size)[self.dp_rank] for part in reference.batch_of(step, self.device)]
            self.scaler.scale(reference.loss_of(self.wrapped, *shares)).backward()
            if reference.is_skipped(self.feature, step) and (dist.get_rank() == 0 or not self.is_sharded):
                shard(self.model.a.weight.grad).view(-1)[0] = float("inf")
            for name in reference.names_without_gradient(self.feature, step):
                self.model.get_parameter(name).grad = None
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(reference.lr_at(self.feature, step))
            with self.moves_nothing_if_it_raises():
                self.scaler.step(self.optimizer)
            self.scaler.update()

    def averaged_output(self) -> Tensor:
        """Return the model's output for a batch, with averages as weights."""
        with self.moves_nothing_if_it_raises():
            swap = unwrap(self.optimizer).swap_ema_params()
            swap.__enter__()
        try:
            return reference.output_of(self.wrapped, self.device)
        finally:
            swap.__exit__(None, None, None)

    def found(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights and their states; under ZeRO, the first process has all states."""
        found = {"weights": {name: whole(param) for name, param in self.params.items()}}
        states = self._states()
        if self.way == "ZeRO":
            contents = self._consolidated()
            if dist.get_rank() != 0:
                return found
            by_index = contents["state"]
            states = {param: by_index[i] for i, param in enumerate(self.params.values()) if i in by_index}
        for kind, key in (("masters", "master_params"), ("averages", "ema_params")):
            found[kind] = {name: whole(states.get(param, {}).get(key, param)) for name, param in self.params.items()}
        return found

    def _consolidated(self) -> dict[str, Any] | None:
        self.optimizer.consolidate_state_dict(to=0)
        if self.device == "npu":
            torch.npu.synchronize()  # torch copies the states to the CPU without waiting
        return self.optimizer.state_dict() if dist.get_rank() == 0 else None

    def save(self, path: str) -> None:
        """Write a checkpoint in the usual way of this distribution."""
        with self.moves_nothing_if_it_raises():
            if self.is_sharded:
                weights, state = get_state_dict(self.model, self.optimizer)
                contents = {"model": weights, "optimizer": state, "scaler": self.scaler.state_dict()}
                dcp.save(contents, checkpoint_id=path)
                return
            state = self._consolidated() if self.way == "ZeRO" else self.optimizer.state_dict()
            contents = {"model": self.model.state_dict(), "optimizer": state, "scaler": self.scaler.state_dict()}
            if dist.get_rank() == 0:
                torch.save(contents, path)
        dist.barrier()

    def load(self, path: str) -> None:
        """Resume from a checkpoint."""
        if self.is_sharded:
            weights, state = get_state_dict(self.model, self.optimizer)
            contents = {"model": weights, "optimizer": state, "scaler": self.scaler.state_dict()}
            dcp.load(contents, checkpoint_id=path)
            options = {"model_state_dict": contents["model"], "optim_state_dict": contents["optimizer"]}
            set_state_dict(self.model, self.optimizer, **options)
        else:
            contents = torch.load(path, map_location=self.device)
            self.model.load_state_dict(contents["model"])
            self.optimizer.load_state_dict(contents["optimizer"])
        self.scaler.load_state_dict(contents["scaler"])


def train(make: Callable[..., Training], path: str) -> Any:
    """Train without interruption."""
    training = make()
    training.train(range(reference.STEPS))
    return training.found()


def evaluate_averages(make: Callable[..., Training], path: str) -> Any:
    """Evaluate the averages and continue training; at the end evaluate them between two evaluations of the weights."""
    training = make()
    training.train(range(reference.HALF))
    outputs = {"averages midway": training.averaged_output()}
    training.train(range(reference.HALF, reference.STEPS))
    outputs["weights"] = reference.output_of(training.wrapped, training.device)
    outputs["averages"] = training.averaged_output()
    outputs["weights again"] = reference.output_of(training.wrapped, training.device)
    return {**training.found(), "outputs": outputs}


def save(make: Callable[..., Training], path: str) -> None:
    """Train half of the steps and write a checkpoint."""
    training = make()
    training.train(range(reference.HALF))
    training.save(path)


def resume(make: Callable[..., Training], path: str) -> Any:
    """Resume from the checkpoint with another model."""
    training = make(seed=1)
    training.load(path)
    training.train(range(reference.HALF, reference.STEPS))
    return training.found()


def save_and_resume(make: Callable[..., Training], path: str) -> Any:
    """Do both in the same processes."""
    save(make, path)
    return resume(make, path)


def averages_file(make: Callable[..., Training], path: str) -> Any:
    """Return the contents of the averages file, which a model that is not distributed loads."""
    training = make()
    training.train(range(reference.STEPS))
    with training.moves_nothing_if_it_raises():
        unwrap(training.optimizer).save_ema_model(training.model, path)
    dist.barrier()
    if dist.get_rank() != 0:
        return None
    contents = torch.load(path, map_location="cpu", weights_only=True)
    reference.Model().load_state_dict(contents)
    return contents


def results(device: str, way: str, cells: Sequence[tuple[str, str]], folder: str) -> dict[Any, Any]:
    """Run functions of this module with features, as one of the processes."""
    warnings.simplefilter("ignore")

    def case(function: str, feature: str) -> Any:
        path = str(Path(folder, f"{feature} {function.replace('resume', 'save')}"))
        return globals()[function](partial(Training, way, feature, device), path)

    return results_of((cell, partial(case, *cell)) for cell in cells)
