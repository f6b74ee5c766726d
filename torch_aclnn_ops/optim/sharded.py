"""Support for sharded parameters: resharding of FSDP modules, full state dicts, and files saved by one rank."""

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any

from torch_aclnn_ops._tensors import is_dtensor
from torch_aclnn_ops._torch_compat.private import (
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
from torch_aclnn_ops.optim.state import describe_params

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


class FsdpUnits:
    """The FSDP1 and FSDP2 units with parameters of an optimizer, each all-gathered and sharded as a whole.

    A forward pass without a backward pass leaves some units unsharded, usually the root, and the next forward pass
    would use their stale weights. Therefore units are resharded before sharded parameters are written to.

    Args:
        optimizer: The optimizer. All of its parameters count, with or without a state: FSDP1 may give a rank empty
            shards without a state, and all ranks must reshard the same units.
        model: The model that has all FSDP1 parameters of the optimizer, which do not know their modules.
        method: The name of the calling method, for messages.

    Raises:
        RuntimeError: A unit is in a forward or backward pass, or the model lacks FSDP1 parameters.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, method: str) -> None:
        params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        ids = {id(param) for param in params}
        fsdp1_params = [param for param in params if is_in_fsdp1_unit(param)]
        units: list[Fsdp1Unit | Fsdp2Unit] = []
        if any(map(is_dtensor, params)):
            units += fsdp2_units()
        if fsdp1_params and model is not None:
            units += fsdp1_units(model)
        self._units = [unit for unit in units if any(id(param) in ids for param in unit.params)]
        found = {id(param) for unit in self._units for param in unit.params}
        if lost := [param for param in fsdp1_params if id(param) not in found]:
            raise RuntimeError(
                f"{method}: model must be the FullyShardedDataParallel that has all parameters of the optimizer, but"
                f" {'it is None' if model is None else 'it lacks some'}; pass the one that has parameters"
                f" {describe_params(optimizer, lost)}"
            )
        if busy := [param for unit in self._units if unit.is_busy() for param in unit.params]:
            raise RuntimeError(
                f"{method}: FSDP is in a forward or backward pass, or in summon_full_params(), of parameters"
                f" {describe_params(optimizer, busy)}; call it outside of these. After a pass that raised an"
                " exception, first run one that completes"
            )

    def reshard(self) -> None:
        """Reshard all units, so that the next forward pass all-gathers the current parameters."""
        self.synchronize()
        for unit in self._units:
            unit.reshard()

    def synchronize(self) -> None:
        """Synchronize with the devices, because FSDP's streams do not wait for writes to the shards."""
        for device in {unit.device for unit in self._units}:
            synchronize(device)


class ShardedModel:
    """A model whose parameters hold their EMA weights, and the process groups over which they are sharded, if any."""

    def __init__(self, model: nn.Module) -> None:
        self.module, self._fsdp1 = model, fsdp1_module(model)
        # A state dict of FSDP1 has copies of the parameters.
        self._contents: dict[str, Any] = {} if self._fsdp1 is not None else model.state_dict(keep_vars=True)
        meshes = [value.device_mesh for value in self._contents.values() if is_dtensor(value)]
        # The largest mesh includes the ranks of all others, such as one dimension of FSDP and TP.
        mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self._groups = [] if mesh is None else mesh.get_all_groups()
        self._is_first = mesh is None or not any(mesh.get_coordinate())
        if self._fsdp1 is not None:
            self._groups, self._is_first = fsdp1_groups(self._fsdp1), torch.distributed.get_rank() == 0

    def copied_state_dict(self, is_full: bool) -> tuple[dict[str, Any], Exception | None]:
        """Return copies; with ``is_full``, a sharded model's are full tensors on the CPU, on the first rank only.

        The exception of this rank, if any, is not raised, because the others would wait for it in a collective.
        """
        gathers = is_full and bool(self._groups)
        if gathers and self._fsdp1 is not None:
            return self._gather_fsdp1(), None
        contents = self._contents if self._fsdp1 is None else self.module.state_dict(keep_vars=True)
        copies: dict[int, Any] = {}  # tied weights share one
        failure: Exception | None = None
        for name, value in contents.items():
            if isinstance(value, Tensor) and id(value) not in copies:
                weights = _full_tensor(value.detach()) if gathers else value.detach()
                copies[id(value)] = None
                if self._is_first or not gathers:
                    try:
                        copies[id(value)] = weights.to(torch.device("cpu") if gathers else value.device, copy=True)
                    except (RuntimeError, MemoryError) as error:
                        failure = failure or error
            contents[name] = copies.get(id(value), value)
        is_empty = failure is not None or (gathers and not self._is_first)
        return {} if is_empty else contents, failure

    def _gather_fsdp1(self) -> dict[str, Any]:
        # Imported here, because it takes half as long as importing torch.
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        ranks = torch.distributed.get_process_group_ranks(self._groups[0])
        if len(self._groups) == 1 and 0 not in ranks:
            raise RuntimeError(
                "full_state_dict: FullyShardedDataParallel gathers full tensors on rank 0 only, which must be in its"
                f" process_group, but that has ranks {ranks}"
            )
        # On the CPU every rank gets a copy, because torch before 2.14 crashes when it offloads CPU tensors.
        offloads = self._fsdp1.compute_device.type != "cpu"
        options = StateDictOptions(full_state_dict=True, cpu_offload=offloads)
        contents: dict[str, Any] = get_model_state_dict(self.module, options=options)
        if not self._is_first:
            return {}
        for first, *others in fsdp1_tied_names(self.module):
            contents.update({name: contents[first] for name in others})
        return contents

    def save_on_one_rank(
        self, contents: Mapping[str, Any], path: str | os.PathLike[str], failure: Exception | None
    ) -> None:
        """Save the state dict of the first rank to a file; all ranks return once it is written, or all raise.

        Other ranks have an empty one; ``failure`` is an earlier exception of this rank.
        """
        error: BaseException | None = failure
        if error is None and (contents or not self._groups):
            try:
                with _replacing(path) as file:
                    torch.save(contents, file)
            except BaseException as caught:
                error = caught
        report = None if error is None else (isinstance(error, OSError), f"{type(error).__name__}: {error}")
        for group in self._groups:  # one mesh dimension after the other, so that the report reaches all ranks
            reports: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(reports, report, group=group)
            report = next(filter(None, reports), None)
        if error is not None:
            raise error
        if report is not None:
            is_os_error, text = report
            raise (OSError if is_os_error else RuntimeError)(
                f"save_ema_model: the rank that writes {os.fspath(path)!r} failed ({text})"
            )


def _full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, or the tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    device_type = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    if tensor.device.type != device_type:  # offloaded to the CPU, which the group may not support
        tensor = tensor.to(device_type)
    full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that atomically replaces ``path`` when the block exits, with default permissions.

    The target of a symbolic link is replaced, and the link is kept. Device nodes and FIFOs are written to directly. A
    killed process leaves its temporary file, ``.NAME.`` and 32 hexadecimal digits, next to the target.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with open(path, "wb") as file:
            yield file
        return
    temporary = target.with_name(f".{target.name[:50]}.{uuid.uuid4().hex}")  # at most 255 bytes
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
