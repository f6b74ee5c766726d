"""Loading of state dicts: this optimizer's, those of torch's Adam and AdamW, and MindSpeed's FusedEmaAdamW."""

import reprlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any, NamedTuple

from torch_aclnn_ops._nested import map_nested
from torch_aclnn_ops.ops.ema_adam.lists import is_dense, is_dtensor, is_plain, local
from torch_aclnn_ops.optim.options import options_of
from torch_aclnn_ops.optim.state import TENSOR_STATES

import torch
from torch import Tensor

_LOAD = "FusedEmaAdam.load_state_dict"
_LARGEST_STEP = 2**53  # float64 represents all integers up to it
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
# Options that torch's Adam and AdamW have in every group, also after they have loaded one of this optimizer.
_TORCHS_OPTIONS = ("amsgrad", "foreach", "capturable", "differentiable", "fused")
# States of this optimizer that torch's keep unchanged while they train the weights.
_STALE = ("ema_params", "master_params")
_FULL_TENSORS = (
    " (load full tensors with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict and"
    " StateDictOptions(full_state_dict=True))"
)


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
    _require(isinstance(state_dict, Mapping), "the state dict", "a dict", state_dict, TypeError)
    return dict(state_dict)


class _Place(NamedTuple):
    """A parameter, and what its group in a state dict says of it."""

    param: Tensor
    name: str
    group_step: Any  # MindSpeed has the step in the group instead of the states
    is_torchs: bool


def convert(state_dict: Any, groups: list[dict[str, Any]], options: Collection[str]) -> dict[str, Any]:
    """Check a state dict and convert it for an optimizer with these parameter groups.

    Args:
        state_dict: The state dict of any of the supported optimizers; it is not modified.
        groups: The optimizer's parameter groups.
        options: The names of their options, which are unchanged if the state dict lacks them.

    Returns:
        ``param_groups``, and ``state`` keyed by parameter, as attributes of an optimizer.
    """
    contents = shallow_copy(state_dict)
    all_saved: Any
    saved_states: Any
    all_saved, saved_states = contents.get("param_groups"), contents.get("state")
    _require(isinstance(all_saved, (list, tuple)), "param_groups", "a list of groups", all_saved, TypeError)
    _require(isinstance(saved_states, Mapping), "state", "a dict", saved_states, TypeError)
    for i, saved in enumerate(all_saved):
        _require(isinstance(saved, Mapping), f"group {i}", "a dict", saved, TypeError)
        ids = saved.get("params")
        _require(isinstance(ids, (list, tuple)), f"params of group {i}", "a list of ids", ids, TypeError)
    all_saved = _in_order_of(groups, all_saved)
    count = len(groups)
    _require(len(all_saved) == count, "the number of groups", f"{count}, as in the optimizer", len(all_saved))
    places: dict[Hashable, _Place] = {}
    loaded_groups = []
    for i, (saved, group) in enumerate(zip(all_saved, groups, strict=True)):
        loaded_groups.append(_loaded_group(i, saved, group, options))
        _add_places(places, i, saved, group)
    # A step cannot write to tensors created in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        return {"state": _loaded_states(saved_states, places), "param_groups": loaded_groups}


def _require(holds: bool, what: str, accepted: str, value: object, error: type[Exception] = ValueError) -> None:
    if not holds:
        raise error(f"{_LOAD}: {what} must be {accepted}, but it is {_short_repr(value)}")


def _short_repr(value: object) -> str:
    """Return a short single-line repr."""
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    if value.dim() == 0 and is_plain(value) and not value.is_meta and not value.is_quantized:
        return repr(value)
    where = f"with {value.placements}" if is_dtensor(value) else f"on {value.device}"  # type: ignore[attr-defined]
    return f"a {type(value).__name__} of {value.dtype}, {value.layout}, {list(value.shape)} {where}"


def _in_order_of(groups: list[dict[str, Any]], all_saved: Sequence[Any]) -> Sequence[Any]:
    """Return saved groups in the order of the optimizer's, and their parameters too, if both have names.

    Without names on one side, the order decides, as in torch, whose ``load_state_dict`` ignores names. It also decides
    for ``torch.distributed.checkpoint``, which has put the parameters in the optimizer's order by their own names.
    """
    all_names: list[list[str]] = [group.get("param_names", []) for group in groups]
    if not any(all_names) or not any("param_names" in saved for saved in all_saved):
        return all_saved
    if any(map(_has_names_as_ids, all_saved)):
        return all_saved
    by_names: dict[frozenset[str], tuple[Any, dict[str, Any]]] = {}
    all_saved_names = []
    for i, saved in enumerate(all_saved):
        names, ids = saved.get("param_names", []), saved["params"]
        are_names = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        accepted = f"a list of {len(ids)} str, one for each parameter"
        _require(are_names and len(names) == len(ids), f"param_names of group {i}", accepted, names)
        all_saved_names.append(list(names))
        by_names[frozenset(names)] = saved, dict(zip(names, ids, strict=True))
    if all_saved_names == all_names:
        return all_saved
    are_unique = len({name for names in all_names for name in names}) == sum(map(len, all_names))
    has_same_groups = sorted(map(sorted, all_saved_names)) == sorted(map(sorted, all_names))
    accepted = f"{reprlib.repr(all_names)} in any order, each name once (to load by order, remove param_names)"
    _require(are_unique and has_same_groups, "param_names of the groups", accepted, all_saved_names)
    found = [(by_names[frozenset(names)], names) for names in all_names]
    return [{**saved, "params": [ids[name] for name in names]} for (saved, ids), names in found]


def _has_names_as_ids(saved: Mapping[str, Any]) -> bool:
    """Return whether a group is one of ``torch.distributed.checkpoint``, which has names in place of numbers."""
    return any(isinstance(key, str) for key in saved["params"])


def _add_places(places: dict[Hashable, _Place], i: int, saved: Mapping[str, Any], group: dict[str, Any]) -> None:
    """Find the parameters of a group by their ids in a state dict."""
    ids, count = saved["params"], len(group["params"])
    _require(len(ids) == count, f"the number of params of group {i}", f"{count}, as in the optimizer", len(ids))
    is_torchs = _is_torchs(saved)
    for j, (key, param) in enumerate(zip(ids, group["params"], strict=True)):
        name = f"parameter {j} of group {i}"
        _require(isinstance(key, Hashable), f"the id of {name}", "an int or a str", key, TypeError)
        place = places.setdefault(key, _Place(param, name, saved.get("step"), is_torchs))
        _require(place.param is param, f"the id of {name}", f"another one than that of {place.name}", key)


def _loaded_group(i: int, saved: Mapping[str, Any], group: dict[str, Any], options: Collection[str]) -> dict[str, Any]:
    if "ema_decay" not in saved:  # options that are missing there keep their values
        _check_is_of_adam(i, saved)
    loaded = {name: deepcopy(value) for name, value in saved.items() if name not in ("params", "step")}
    if "param_names" in group or _has_names_as_ids(saved):
        loaded.pop("param_names", None)
    for name in {*options, "param_names"} & group.keys():
        loaded.setdefault(name, group[name])
    lr = loaded["lr"]
    is_readable = not isinstance(lr, Tensor) or not lr.is_meta or all(param.is_meta for param in group["params"])
    _require(is_readable, f"lr of group {i}", "a number or a tensor with one", lr)
    try:
        options_of(loaded)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_LOAD}: in group {i}, {str(error).removeprefix('FusedEmaAdam: ')}") from None
    if _has_torchs_options(saved):  # so that a state dict with them is one that torch's optimizers have saved
        loaded = {name: value for name, value in loaded.items() if name not in _TORCHS_OPTIONS}
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


def _check_is_of_adam(i: int, saved: Mapping[str, Any]) -> None:
    """Raise if a group is not of Adam or AdamW; those of torch have ``amsgrad``, as only they do, and ``foreach``."""
    needed = ["betas", "eps"] + ["amsgrad"] * ("foreach" in saved) + ["weight_decay"] * ("maximize" in saved)
    lacking = ", ".join(name for name in needed if name not in saved)  # SparseAdam has no weight_decay
    if lacking:
        raise ValueError(f"{_LOAD}: group {i} must have the options of Adam or AdamW, but it lacks {lacking}")


def _loaded_states(all_saved: Mapping[Any, Any], places: Mapping[Hashable, _Place]) -> defaultdict[Any, Any]:
    states: defaultdict[Any, Any] = defaultdict(dict)
    storages = {_storage_of(place.param) for place in places.values()} - {0}
    for key, saved in all_saved.items():
        place = places.get(key)
        if place is not None:
            if saved is not None:  # ZeRO sets None for the parameters of other ranks
                states[place.param] = _loaded_state(saved, place, storages)
        else:
            is_foreign = not isinstance(saved, Mapping) or "exp_avg" not in saved
            _require(is_foreign, "the key of a parameter's state", "an id in params of a group", key)
            states[key] = saved
    return states


def _loaded_state(saved: Any, place: _Place, storages: set[int]) -> dict[str, Any]:
    param, owner, group_step, is_torchs = place
    _require(isinstance(saved, Mapping), f"the state of {owner}", "a dict", saved, TypeError)
    known = (*_ADAM_STATE, *TENSOR_STATES)
    # PyTorch has an empty dict in place of each entry that a flattened state dict lacks.
    state = {name: value for name, value in saved.items() if name not in known or not _is_empty_dict(value)}
    if is_torchs:
        state = {name: value for name, value in state.items() if name not in _STALE}
    if "exp_avg" in state and group_step is not None:
        state.setdefault("step", group_step)
    found = [name for name in _ADAM_STATE if name in state]
    accepted = f"all of {', '.join(_ADAM_STATE)} or none of them"
    _require(len(found) in (0, len(_ADAM_STATE)), f"the entries of the state of {owner}", accepted, found)
    for name, value in state.items():
        if name == "step":
            state[name] = _loaded_step(value, owner)
        elif name in TENSOR_STATES:
            _require(isinstance(value, Tensor), f"{name} of {owner}", "a tensor", value, TypeError)
            for holds, accepted_for in _TENSOR_RULES:
                _require(holds(value, param), f"{name} of {owner}", accepted_for(param), value)
            state[name] = _copy_if_shared(value.detach(), param, storages)
        else:
            state[name] = map_nested(lambda leaf: leaf.to(param.device) if isinstance(leaf, Tensor) else leaf, value)
    return state


def _is_empty_dict(value: object) -> bool:
    return isinstance(value, Mapping) and not value


def _loaded_step(step: Any, owner: str) -> Tensor:
    value: Any = step
    if isinstance(step, Tensor):
        shard = local(step.detach())
        is_known = is_plain(shard) and shard.layout == torch.strided and not shard.is_meta and not shard.is_quantized
        value = shard.item() if is_known and shard.numel() == 1 else None
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    number: Any = value if is_number else -1
    is_count = 0 <= number <= _LARGEST_STEP and number % 1 == 0
    error = ValueError if is_number else TypeError
    _require(is_count, f"step of {owner}", "an integer from 0 to 2**53, or a tensor with one", step, error)
    return torch.tensor(int(value), dtype=torch.int64, device="cpu")


# What a tensor must have in common with its parameter, apart from its device and precision, and how to say it.
_TENSOR_RULES: Sequence[tuple[Callable[[Tensor, Tensor], bool], Callable[[Tensor], str]]] = (
    (
        lambda value, param: is_plain(value) == is_plain(param) and is_dtensor(value) == is_dtensor(param),
        lambda param: (
            f"a {type(param.detach()).__name__}, as its parameter is{_FULL_TENSORS if is_dtensor(param) else ''}"
        ),
    ),
    (lambda value, _: value.layout == torch.strided, lambda _: "dense"),
    (lambda value, _: value.is_floating_point(), lambda _: "real floating point"),
    (lambda value, param: value.shape == param.shape, lambda param: f"of its parameter's shape {list(param.shape)}"),
    (lambda value, param: value.is_meta == param.is_meta, lambda param: f"on {param.device} or another device"),
    (
        lambda value, param: getattr(value, "placements", None) == getattr(param, "placements", None),
        lambda param: f"placed as its parameter, {getattr(param, 'placements', None)}",
    ),
    (
        lambda value, param: local(value).shape == local(param).shape,
        lambda param: f"this rank's shard of its parameter, {list(local(param).shape)}",
    ),
)


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
