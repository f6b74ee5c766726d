"""Loading of state dicts: this optimizer's, those of torch's Adam and AdamW, and MindSpeed's FusedEmaAdamW."""

import reprlib
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from operator import attrgetter
from typing import Any, NamedTuple

from torch_aclnn_ops._nested import map_nested
from torch_aclnn_ops.ops.ema_adam.kernels import is_dense, is_dtensor, is_plain, local
from torch_aclnn_ops.optim._options import options_of
from torch_aclnn_ops.optim._states import AVERAGES

import torch
from torch import Tensor

_LOAD = "FusedEmaAdam.load_state_dict"
_LARGEST_STEP = 2**53  # float64 represents all integers up to it
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
# Options that torch's Adam and AdamW have in every group, also after they have loaded one of this optimizer.
_TORCHS_OPTIONS = ("amsgrad", "foreach", "capturable", "differentiable", "fused")
# States of this optimizer that torch's keep unchanged while they train the weights.
_STALE = ("ema_params", "master_params")


def export_steps(_: object, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose steps are float64 CPU tensors: exact, and compatible with PyTorch's optimizers."""
    params = {key for group in state_dict["param_groups"] for key in group["params"]}
    states = {
        key: {**state, "step": _export_step(state["step"])} if key in params and "step" in state else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _export_step(step: Any) -> Tensor:
    # On the CPU, whatever the default device is.
    tensor = step.detach() if isinstance(step, Tensor) else torch.tensor(step, device="cpu")
    return tensor if tensor.is_meta else tensor.cpu().to(torch.float64)


def shallow_copy(state_dict: Any) -> dict[str, Any]:
    """Return a shallow copy of a state dict."""
    return dict(_check_type(state_dict, Mapping, "the state dict", "a dict"))


def convert(state_dict: Any, groups: list[dict[str, Any]], options: Collection[str]) -> dict[str, Any]:
    """Validate a state dict and convert it for an optimizer with these parameter groups.

    Args:
        state_dict: The state dict of any of the supported optimizers; it is not modified.
        groups: The optimizer's parameter groups.
        options: The names of their options, which are unchanged if the state dict lacks them.

    Returns:
        ``param_groups``, and ``state`` keyed by parameter, as attributes of an optimizer.
    """
    contents = shallow_copy(state_dict)
    for name in ("param_groups", "state"):
        if name not in contents:
            raise ValueError(f"{_LOAD}: the state dict must have 'param_groups' and 'state', but it has no {name!r}")
    all_saved = _check_type(contents["param_groups"], (list, tuple), "param_groups", "a list")
    for i, saved in enumerate(all_saved):
        _check_type(saved, Mapping, f"group {i}", "a dict")
    all_saved = _in_the_order_of(groups, all_saved)
    if len(all_saved) != len(groups):
        raise ValueError(
            f"{_LOAD}: the loaded state dict has a different number of parameter groups: it has {len(all_saved)}, and"
            f" the optimizer has {len(groups)}"
        )
    loaded_groups, places = [], _Places()
    for i, (saved, group) in enumerate(zip(all_saved, groups, strict=True)):
        places.add(i, saved, group)
        loaded_groups.append(_loaded_group(i, saved, group, options))
    # A step cannot write to tensors created in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        states = _loaded_states(_check_type(contents["state"], Mapping, "state", "a dict"), places)
    return {"state": states, "param_groups": loaded_groups}


def _in_the_order_of(groups: list[dict[str, Any]], all_saved: Sequence[Any]) -> Sequence[Any]:
    """Return saved groups in the order of the optimizer's, and their parameters too, if both have names.

    Without names on one side, the order decides, as in torch, whose ``load_state_dict`` ignores names. It also decides
    for ``torch.distributed.checkpoint``, which has put the parameters in the optimizer's order by their own names.
    """
    all_names: list[list[str]] = [group.get("param_names", []) for group in groups]
    if not any(all_names) or not any("param_names" in saved for saved in all_saved):
        return all_saved
    if any(map(_has_names_as_ids, all_saved)):
        return all_saved
    all_saved_names = [_names_in(i, saved) for i, saved in enumerate(all_saved)]
    if all_saved_names == all_names:
        return all_saved
    ordered = []
    for i, names in enumerate(all_names):
        matching = [j for j, saved_names in enumerate(all_saved_names) if sorted(saved_names) == sorted(names)]
        if len(matching) != 1 or len(set(names)) != len(names):
            raise _names_differ(i, names, all_saved_names)
        saved, saved_names = all_saved[matching[0]], all_saved_names[matching[0]]
        ids = dict(zip(saved_names, saved["params"], strict=True))
        ordered.append({**saved, "params": [ids[name] for name in names]})
    if len(all_saved) != len(groups):
        raise _names_differ(0, all_names[0], all_saved_names)
    return ordered


def _has_names_as_ids(saved: Mapping[str, Any]) -> bool:
    """Return whether a group is one of ``torch.distributed.checkpoint``, which has names in place of numbers."""
    ids = saved.get("params")
    return isinstance(ids, (list, tuple)) and any(isinstance(key, str) for key in ids)


def _names_in(i: int, saved: Mapping[str, Any]) -> list[str]:
    ids = _check_type(saved.get("params"), (list, tuple), f"params of group {i}", "a list of ids")
    names = saved.get("param_names", [])
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{_LOAD}: param_names of group {i} must be a list of str, but it is {_short_repr(names)}")
    if len(names) != len(ids):
        raise ValueError(
            f"{_LOAD}: param_names of group {i} must have a name for each of its {len(ids)} parameters, but it has"
            f" {len(names)}"
        )
    return list(names)


def _names_differ(i: int, names: list[str], all_saved_names: list[list[str]]) -> ValueError:
    saved = {name for saved_names in all_saved_names for name in saved_names}
    missing = [name for name in names if name not in saved]
    found = f"has no {reprlib.repr(missing)}" if missing else f"has {reprlib.repr(all_saved_names)}"
    return ValueError(
        f"{_LOAD}: the state dict must have one group with the parameter names of the optimizer's group {i},"
        f" {reprlib.repr(names)}, each once, but it {found}; to load by order, remove 'param_names' from its groups"
    )


def _check_type(value: Any, accepted: Any, what: str, name: str) -> Any:
    if not isinstance(value, accepted):
        raise TypeError(f"{_LOAD}: {what} must be {name}, but it is {_short_repr(value)}")
    return value


def _short_repr(value: Any) -> str:
    """Return a short single-line repr."""
    if isinstance(value, Tensor) and (value.dim() or not is_plain(value) or value.is_meta or value.is_quantized):
        return f"a {type(value).__name__} of {value.dtype}, {value.layout}, {list(value.shape)} on {value.device}"
    return repr(value) if isinstance(value, Tensor) else reprlib.repr(value)


class _Place(NamedTuple):
    param: Tensor
    name: str
    group_step: Any  # MindSpeed has the step in the group instead of the states
    is_torchs: bool


class _Places(dict[Hashable, _Place]):
    """The optimizer's parameters, keyed by their ids in a state dict."""

    def add(self, i: int, saved: Mapping[str, Any], group: dict[str, Any]) -> None:
        """Add the parameters of a group."""
        ids: Sequence[Any] = _check_type(saved.get("params"), (list, tuple), f"params of group {i}", "a list of ids")
        if len(ids) != len(group["params"]):
            raise ValueError(
                f"{_LOAD}: the loaded state dict contains a parameter group that doesn't match the size of optimizer's"
                f" group: group {i} has {len(ids)} parameters, and {len(group['params'])} in the optimizer"
            )
        is_torchs = _is_torchs(saved)
        for j, (key, param) in enumerate(zip(ids, group["params"], strict=True)):
            name = f"parameter {j} of group {i}"
            _check_type(key, Hashable, f"the id of {name}", "an int or a str")
            place = self.setdefault(key, _Place(param, name, saved.get("step"), is_torchs))
            if place.param is not param:
                raise ValueError(f"{_LOAD}: {name} and {place.name} must have different ids, but both have {key!r}")


def _loaded_group(i: int, saved: Mapping[str, Any], group: dict[str, Any], options: Collection[str]) -> dict[str, Any]:
    if saved.get("amsgrad"):
        raise ValueError(
            f"FusedEmaAdam: the state to load has amsgrad=True in group {i}, which this optimizer does not support"
        )
    _check_optimizer(i, saved)
    dropped = {"params", "step"}
    if _has_torchs_options(saved):  # so that a state dict with them is one that torch's optimizers have saved
        dropped.update(_TORCHS_OPTIONS)
    loaded = {name: deepcopy(value) for name, value in saved.items() if name not in dropped}
    if "param_names" in group or _has_names_as_ids(saved):
        loaded.pop("param_names", None)
    for name in {*options, "param_names"} & group.keys():
        loaded.setdefault(name, group[name])
    if (
        isinstance(loaded["lr"], Tensor)
        and loaded["lr"].is_meta
        and not all(map(attrgetter("is_meta"), group["params"]))
    ):
        raise ValueError(f"{_LOAD}: in group {i}, lr must be a number or a tensor with one, but it is on meta")
    try:
        options_of(loaded)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_LOAD}: in group {i}, {str(error).removeprefix('FusedEmaAdam: ')}") from None
    return {**loaded, "params": group["params"]}


def _has_torchs_options(saved: Mapping[str, Any]) -> bool:
    return saved.keys() >= set(_TORCHS_OPTIONS)


def _is_torchs(saved: Mapping[str, Any]) -> bool:
    """Return whether torch's Adam or AdamW has saved a group, possibly after it has loaded one of this optimizer.

    Version 0.2 of this optimizer kept torch's options, to which it added its own; torch's optimizers do the reverse.
    """
    names = list(saved)
    is_older = "ema_decay" in saved and "amsgrad" in names[: names.index("ema_decay")]
    return _has_torchs_options(saved) and not is_older


def _check_optimizer(i: int, saved: Mapping[str, Any]) -> None:
    """Raise if a group is not of Adam or AdamW; those of torch have ``amsgrad``, as only they do, and ``foreach``."""
    if "ema_decay" in saved:  # options that are missing there keep their values
        return
    missing = [name for name in ("betas", "eps") if name not in saved]
    if not missing and "foreach" in saved and "amsgrad" not in saved:
        missing = ["amsgrad"]
    if not missing and "maximize" in saved and "weight_decay" not in saved:  # torch's SparseAdam
        missing = ["weight_decay"]
    if missing:
        raise ValueError(
            f"{_LOAD}: group {i} must have the options of Adam or AdamW, but it has no {' and no '.join(missing)}"
        )


def _loaded_states(all_saved: Mapping[Any, Any], places: _Places) -> defaultdict[Any, Any]:
    states: defaultdict[Any, Any] = defaultdict(dict)
    storages = {_storage_of(place.param) for place in places.values()} - {0}
    for key, saved in all_saved.items():
        place = places.get(key)
        if place is not None:
            if saved is not None:  # ZeRO sets None for the parameters of other ranks
                states[place.param] = _loaded_state(saved, place, storages)
        elif isinstance(saved, Mapping) and "exp_avg" in saved:
            raise ValueError(f"{_LOAD}: state has a parameter with the id {key!r}, which must be in params of a group")
        else:
            states[key] = saved
    return states


def _loaded_state(saved: Any, place: _Place, storages: set[int]) -> dict[str, Any]:
    param, owner, group_step, is_torchs = place
    state = dict(_check_type(saved, Mapping, f"the state of {owner}", "a dict"))
    if is_torchs:
        state = {name: value for name, value in state.items() if name not in _STALE}
    if "exp_avg" in state and group_step is not None:
        state.setdefault("step", group_step)
    missing = [name for name in _ADAM_STATE if name not in state]
    if 0 < len(missing) < len(_ADAM_STATE):
        raise ValueError(
            f"{_LOAD}: the state of {owner} must have {', '.join(_ADAM_STATE)} or none of them, but it has no"
            f" {' and no '.join(missing)}"
        )
    for name, value in state.items():
        if name == "step":
            state[name] = _loaded_step(value, owner)
        elif name in AVERAGES:
            reason = _mismatch(_check_type(value, Tensor, f"{name} of {owner}", "a tensor"), param)
            if reason:
                raise ValueError(f"{_LOAD}: {name} of {owner} must {reason}")
            state[name] = _copy_if_shared(value.detach(), param, storages)
        else:
            state[name] = map_nested(lambda leaf: leaf.to(param.device) if isinstance(leaf, Tensor) else leaf, value)
    return state


def _loaded_step(step: Any, owner: str) -> Tensor:
    accepted = f"step of {owner} must be an integer from 0 to 2**53, or a tensor with one"
    value: Any = step
    if isinstance(step, Tensor):
        shard = local(step.detach())
        if not is_plain(shard) or shard.layout != torch.strided or shard.is_meta or shard.is_quantized:
            raise TypeError(f"{_LOAD}: {accepted}, but it is {_short_repr(step)}")
        if step.numel() != 1:
            raise ValueError(f"{_LOAD}: {accepted}, but its shape is {list(step.shape)}")
        value = shard.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{_LOAD}: {accepted}, but it is {_short_repr(step)}")
    number: Any = value
    if not 0 <= number <= _LARGEST_STEP or not float(number).is_integer():
        raise ValueError(f"{_LOAD}: {accepted}, but it is {_short_repr(step)}")
    return torch.tensor(int(number), dtype=torch.int64, device="cpu")


def _mismatch(value: Tensor, param: Tensor) -> str | None:
    """Return why a tensor cannot be a state of a parameter, apart from its device and precision, or ``None``."""
    if is_plain(value) != is_plain(param) or is_dtensor(value) != is_dtensor(param):
        remedy = ""
        if is_dtensor(param) and is_plain(value):
            remedy = (
                "; save and load full tensors with get_optimizer_state_dict and set_optimizer_state_dict of"
                " torch.distributed.checkpoint.state_dict and StateDictOptions(full_state_dict=True)"
            )
        return f"be a {type(param.detach()).__name__}, as its parameter is, but it is a {type(value).__name__}{remedy}"
    if value.layout != torch.strided:
        return f"be dense, but it is {value.layout}"
    if not value.is_floating_point():
        return f"have a real floating-point dtype, but it has {value.dtype}"
    if value.shape != param.shape:
        return f"have the shape of its parameter {list(param.shape)}, but its shape is {list(value.shape)}"
    if value.is_meta != param.is_meta:
        return f"be on {param.device}, as its parameter is, or where it can be copied from, but it is on {value.device}"
    placements, expected = getattr(value, "placements", None), getattr(param, "placements", None)
    if placements != expected:
        return f"have the placements of its parameter {expected}, but it has {placements}"
    shard, its_shard = list(local(param).shape), list(local(value).shape)
    if its_shard != shard:
        return f"have this rank's shard of its parameter, {shard}, but it is another rank's, {its_shard}"
    return None


def _copy_if_shared(value: Tensor, param: Tensor, storages: set[int]) -> Tensor:
    """Return a tensor, or a copy of it if it shares its storage or cannot be written to."""
    shard, storage = local(value), _storage_of(value)
    if storage in storages or shard.is_inference() or shard.is_neg() or not is_dense(shard):
        value = torch.empty_like(param, dtype=value.dtype).copy_(value)
    elif storage:
        storages.add(storage)
    return value


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or 0 if it has none."""
    shard = local(tensor)
    return shard.untyped_storage().data_ptr() if is_plain(shard) and not shard.is_meta else 0
