"""Averages of sharded parameters: modules that FSDP has left unsharded, whole state dicts, files of one rank."""

import inspect
import os
import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch_aclnn_ops._files import replacing
from torch_aclnn_ops._torch_compat.fsdp import (
    Fsdp1Unit,
    Fsdp2Unit,
    fsdp1_groups,
    fsdp1_module,
    fsdp1_tied_names,
    fsdp1_units,
    fsdp2_units,
    is_in_fsdp1_unit,
)
from torch_aclnn_ops._torch_compat.public import synchronize
from torch_aclnn_ops.ops.ema_adam.kernels import is_plain
from torch_aclnn_ops.optim._states import describe_params

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a ``DTensor``."""
    return isinstance(tensor, Tensor) and not is_plain(tensor) and hasattr(tensor, "device_mesh")


class FsdpUnits:
    """The FSDP units that an optimizer updates, FSDP1's and FSDP2's: what they gather and shard together.

    A forward pass without a backward pass leaves some of them unsharded, the root's in most cases, and the next forward
    pass computes with what it finds there. So whoever writes to sharded parameters reshards before.

    Args:
        optimizer: the optimizer, of which all parameters count, with or without a state: FSDP1 gives a rank empty
            shards, which have none, and all ranks have to gather the same units again.
        method: the method that is called, for messages.

    Raises:
        RuntimeError: a unit is inside of a forward or backward pass, or FSDP1's modules were not found.
    """

    def __init__(self, optimizer: Optimizer, method: str) -> None:
        params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        ids = {id(param) for param in params}
        of_fsdp1 = [param for param in params if is_in_fsdp1_unit(param)]
        units: list[Fsdp1Unit | Fsdp2Unit] = []
        if any(map(is_sharded, params)):
            units += fsdp2_units()
        if of_fsdp1:
            units += fsdp1_units()
        self._units = [unit for unit in units if any(id(param) in ids for param in unit.params)]
        found = {id(param) for unit in self._units for param in unit.params}
        if lost := [param for param in of_fsdp1 if id(param) not in found]:
            raise RuntimeError(
                f"{method}: no FullyShardedDataParallel was found that has parameters"
                f" {describe_params(optimizer, lost)}, so it is unknown whether it holds unsharded weights; keep the"
                " module alive, and call gc.unfreeze() if gc.freeze() was called after it was made"
            )
        if busy := [param for unit in self._units if unit.is_busy() for param in unit.params]:
            raise RuntimeError(
                f"{method}: FSDP is in a forward or backward pass, or in summon_full_params(), of parameters"
                f" {describe_params(optimizer, busy)}; call it outside of these. After a pass that has raised an"
                " exception, let the model do one that ends"
            )

    def reshard(self) -> None:
        """Let the next forward pass gather the parameters anew, after everything that has begun to read them."""
        self.synchronize()
        for unit in self._units:
            unit.reshard()

    def synchronize(self) -> None:
        """Wait for the devices: FSDP's streams do not wait for each write, and offloaded shards are read later."""
        for device in {unit.device for unit in self._units}:
            synchronize(device)


def zero_that_makes_it() -> Any:
    """Return the ``ZeroRedundancyOptimizer`` among the callers, or ``None``; it leaves no other trace."""
    zero = sys.modules.get(_ZERO)
    frame = inspect.currentframe() if zero is not None else None
    while frame is not None and frame.f_globals is not vars(zero):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


class Sharers:
    """The ranks that share the parameters of a model.

    Args:
        model: the model, of which each of these ranks has its shards.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._fsdp1 = model, fsdp1_module(model)
        self.has_fsdp1 = self._fsdp1 is not None
        # Modules that FSDP2 has left unsharded show no DTensor until a state dict is made.
        self._contents = {} if self.has_fsdp1 else model.state_dict(keep_vars=True)
        meshes = [value.device_mesh for value in self._contents.values() if is_sharded(value)]
        # The ranks of any other mesh, such as those of one dimension of FSDP and TP, are in the largest one.
        mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self._groups = [] if mesh is None else mesh.get_all_groups()
        self._is_first = mesh is None or not any(mesh.get_coordinate())
        if self.has_fsdp1:
            self._groups, self._is_first = fsdp1_groups(self._fsdp1), torch.distributed.get_rank() == 0
        self.are_several = bool(self._groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the model: its parameters themselves, except FSDP1's, of which it has copies."""
        return self._model.state_dict(keep_vars=True) if self.has_fsdp1 else self._contents

    def gathered(self, states: Mapping[Tensor, Any]) -> tuple[dict[str, Any], Exception | None]:
        """Return the model's state dict on the CPU of the first rank, whole, with averages for its parameters.

        Args:
            states: the optimizer's states. Those of FSDP1 are not used: its parameters must hold their averages.

        Returns:
            The state dict, with nothing in it on the other ranks. And what failed on this rank: if it was raised before
            all tensors are gathered, the other ranks would wait for this one in a collective.
        """
        if self.has_fsdp1:
            return self._gathered_fsdp1(), None
        copies: dict[int, Any] = {}  # of tied weights there is one
        failure: Exception | None = None
        for name, value in self._contents.items():
            if isinstance(value, Tensor) and id(value) not in copies:
                whole = _whole(states.get(value, {}).get("ema_params", value).detach().to(value.dtype))
                copies[id(value)] = None
                if self._is_first and failure is None:
                    try:
                        copies[id(value)] = whole.to("cpu", copy=True)
                    except (RuntimeError, MemoryError) as error:
                        failure = error
            self._contents[name] = copies.get(id(value), value)
        return self._contents if self._is_first and failure is None else {}, failure

    def _gathered_fsdp1(self) -> dict[str, Any]:
        # Imported here, because it takes as long as half of torch.
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        ranks = torch.distributed.get_process_group_ranks(self._groups[0])
        if len(self._groups) == 1 and 0 not in ranks:
            raise RuntimeError(
                "full_state_dict: FullyShardedDataParallel gives whole tensors to rank 0 alone, which must be in its"
                f" process_group, but that has ranks {ranks}"
            )
        # On a CPU every rank gets a copy, because torch before 2.14 crashes where it offloads a CPU's tensors.
        offloads = self._fsdp1.compute_device.type != "cpu"
        options = StateDictOptions(full_state_dict=True, cpu_offload=offloads)
        contents: dict[str, Any] = get_model_state_dict(self._model, options=options)
        if not self._is_first:
            return {}
        for first, *others in fsdp1_tied_names(self._model):
            contents.update({name: contents[first] for name in others})
        return contents

    def write_once(self, contents: Mapping[str, Any], path: str | os.PathLike[str], failure: Exception | None) -> None:
        """Write what one rank has to a file; return on all ranks when it is there, or raise on all ranks.

        Args:
            contents: what to write; nothing on ranks that do not write.
            path: the file.
            failure: what has failed on this rank before.
        """
        error: BaseException | None = failure
        if error is None and (contents or not self._groups):
            try:
                with replacing(path) as file:
                    torch.save(contents, file)
            except BaseException as caught:
                error = caught
        told = None if error is None else (isinstance(error, OSError), f"{type(error).__name__}: {error}")
        for group in self._groups:  # along one dimension of the mesh after the other, so that all ranks know in the end
            all_told: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(all_told, told, group=group)
            told = next(filter(None, all_told), None)
        if error is not None:
            raise error
        if told is not None:
            is_os_error, text = told
            raise (OSError if is_os_error else RuntimeError)(
                f"save_ema_model: the rank that writes {os.fspath(path)!r} has failed ({text})"
            )


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the shards of all ranks."""
    if not is_sharded(tensor):
        return tensor
    device_type = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    if tensor.device.type != device_type:  # offloaded to the CPU, which the mesh's group may not gather from
        tensor = tensor.to(device_type)
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole
