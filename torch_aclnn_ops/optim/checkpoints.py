"""State dicts of this optimizer, of torch's Adam and AdamW, and of MindSpeed's FusedEmaAdamW: loading, conversion."""

import reprlib
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any, NamedTuple

from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._tensors import is_dtensor, local, map_nested
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
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{_LOAD}: the state dict must be a dict, but it is {describe(state_dict)}")
    return dict(state_dict)


class _Place(NamedTuple):
    """A parameter, and what its group in a state dict says of it."""

    param: Tensor
    name: str
    group_step: Any  # MindSpeed has the step in the group instead of the states
    is_torchs: bool


def convert(state_dict: Mapping[str, Any], groups: list[dict[str, Any]], options: Collection[str]) -> dict[str, Any]:
    """Check a state dict and convert it to ``param_groups`` and ``state`` of an optimizer with these groups.

    Options, by their names, are unchanged if the state dict lacks them.
    """
    try:
        all_saved = _in_order_of(groups, state_dict["param_groups"])
        _require(len(all_saved) == len(groups), "the number of groups", f"{len(groups)}", len(all_saved))
        places: dict[Hashable, _Place] = {}
        loaded_groups = []
        for i, (saved, group) in enumerate(zip(all_saved, groups, strict=True)):
            loaded_groups.append(_loaded_group(i, saved, group, options))
            counts = len(group["params"]), len(saved["params"])
            _require(counts[0] == counts[1], f"the number of params of group {i}", f"{counts[0]}", counts[1])
            for j, (key, param) in enumerate(zip(saved["params"], group["params"], strict=True)):
                places[key] = _Place(param, f"parameter {j} of group {i}", saved.get("step"), _is_torchs(saved))
        return {"state": _loaded_states(state_dict["state"], places), "param_groups": loaded_groups}
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{_LOAD}: the state dict must have the form of an optimizer's ({error!r})") from error


def _require(holds: bool, what: str, accepted: str, value: object) -> None:
    if not holds:
        found = _form(value) if isinstance(value, Tensor) else reprlib.repr(value)
        raise ValueError(f"{_LOAD}: {what} must be {accepted}, but it is {found}")


def _in_order_of(groups: list[dict[str, Any]], all_saved: Sequence[Any]) -> Sequence[Any]:
    """Return saved groups in the order of the optimizer's, and their parameters too, if both have names.

    Without names on one side, the order decides, as in torch, whose ``load_state_dict`` ignores names. It also decides
    for ``torch.distributed.checkpoint``, which has put the parameters in the optimizer's order by their own names.
    """
    all_names, all_saved_names = ([list(each.get("param_names", ())) for each in of] for of in (groups, all_saved))
    is_by_order = not any(all_names) or not any(all_saved_names) or any(map(_has_names_as_ids, all_saved))
    if is_by_order or all_saved_names == all_names:
        return all_saved
    are_unique = len({name for names in all_names for name in names}) == sum(map(len, all_names))
    has_same_groups = sorted(map(sorted, all_saved_names)) == sorted(map(sorted, all_names))
    accepted = f"{reprlib.repr(all_names)} in any order, each name once (to load by order, remove param_names)"
    _require(are_unique and has_same_groups, "param_names of the groups", accepted, all_saved_names)
    by_names = {frozenset(names): saved for names, saved in zip(all_saved_names, all_saved, strict=True)}
    found = [by_names[frozenset(names)] for names in all_names]
    all_ids = [dict(zip(saved["param_names"], saved["params"], strict=True)) for saved in found]
    return [
        {**saved, "params": [ids[name] for name in names]}
        for saved, ids, names in zip(found, all_ids, all_names, strict=True)
    ]


def _has_names_as_ids(saved: Mapping[str, Any]) -> bool:
    """Return whether a group is one of ``torch.distributed.checkpoint``, which has names in place of numbers."""
    return any(isinstance(key, str) for key in saved["params"])


def _loaded_group(i: int, saved: Mapping[str, Any], group: dict[str, Any], options: Collection[str]) -> dict[str, Any]:
    if "ema_decay" not in saved:  # options that are missing there keep their values
        _check_is_of_adam(i, saved)
    loaded = {name: deepcopy(value) for name, value in saved.items() if name not in ("params", "step")}
    if "param_names" in group or _has_names_as_ids(saved):
        loaded.pop("param_names", None)
    for name in {*options, "param_names"} & group.keys():
        loaded.setdefault(name, group[name])
    try:
        options_of(loaded)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_LOAD}: in group {i}, {str(error).removeprefix('FusedEmaAdam: ')}") from None
    _require(not saved.get("amsgrad"), f"amsgrad of group {i}", "False", saved.get("amsgrad"))
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
    for key, saved in all_saved.items():
        place = places.get(key)
        if place is None:
            is_foreign = not isinstance(saved, Mapping) or "exp_avg" not in saved
            _require(is_foreign, "the key of a parameter's state", "an id in params of a group", key)
            states[key] = saved
        elif saved is not None:  # ZeRO sets None for the parameters of other ranks
            states[place.param] = _loaded_state(saved, place)
    return states


def _loaded_state(saved: Mapping[str, Any], place: _Place) -> dict[str, Any]:
    param, owner, group_step, is_torchs = place
    known = (*_ADAM_STATE, *TENSOR_STATES)
    # PyTorch has an empty dict in place of each entry that a flattened state dict lacks.
    absent = {name for name in known if isinstance(saved.get(name), Mapping)} | set(_STALE if is_torchs else ())
    state = {name: value for name, value in saved.items() if name not in absent}
    if "exp_avg" in state and group_step is not None:
        state.setdefault("step", group_step)
    names = [name for name in _ADAM_STATE if name in state]
    accepted = f"all of {', '.join(_ADAM_STATE)} or none of them"
    _require(len(names) in (0, len(_ADAM_STATE)), f"the entries of the state of {owner}", accepted, names)
    for name, value in state.items():
        if name == "step":
            state[name] = _loaded_step(value, owner)
        elif name in TENSOR_STATES:
            needed, found = _form(param.detach()), _form(value.detach())
            hint = _FULL_TENSORS if is_dtensor(param) and not is_dtensor(value) else ""
            if found != needed:
                raise ValueError(f"{_LOAD}: {name} of {owner} must be {needed}, as its parameter{hint}, not {found}")
            state[name] = value.detach()
        else:
            state[name] = map_nested(lambda leaf: leaf.to(param.device) if isinstance(leaf, Tensor) else leaf, value)
    return state


def _loaded_step(step: Any, owner: str) -> Tensor:
    value: Any = step
    if isinstance(step, Tensor):
        value = local(step).item() if step.numel() == 1 and not step.is_meta else None
    number: Any = value if isinstance(value, Real) else -1
    is_count = 0 <= number <= _LARGEST_STEP and number % 1 == 0
    _require(is_count, f"step of {owner}", "an integer from 0 to 2**53, or a tensor with one", step)
    return torch.tensor(int(value), dtype=torch.int64, device="cpu")


def _form(value: Tensor) -> str:
    """Describe what a tensor must have in common with its parameter: all but device and precision."""
    dtype = "real" if value.is_floating_point() else str(value.dtype)
    layout = "dense" if value.layout == torch.strided else str(value.layout)
    shard = f" with the shard {list(local(value).shape)} of {value.placements}" if is_dtensor(value) else ""  # type: ignore[attr-defined]
    return (
        f"a {dtype} {layout} {type(value).__name__} of {list(value.shape)}{shard}{' on meta' if value.is_meta else ''}"
    )


def to_mindspeed_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict of :class:`FusedEmaAdam` to the layout of MindSpeed's ``FusedEmaAdamW``.

    That layout has one int64 ``step`` per group, and the states ``exp_avg``, ``exp_avg_sq`` and ``ema_params``.
    ``FusedEmaAdam.load_state_dict`` accepts both layouts.

    Args:
        state_dict: The result of ``FusedEmaAdam.state_dict()``.

    Returns:
        A new dict that shares the tensors.

    Raises:
        TypeError: ``state_dict`` is not a dict.
        ValueError: The step counts of the parameters of a group differ, or EMA weights are missing.

    Example:
        >>> from torch_aclnn_ops.optim import FusedEmaAdam
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedEmaAdam([weight])
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> to_mindspeed_state_dict(optimizer.state_dict())["param_groups"][0]["step"]
        tensor(1)

    Source:
        MindSpeed, mindspeed/core/optimizer/fused_ema_adamw/fused_ema_adamw.py.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"to_mindspeed_state_dict: state_dict must be a dict, but it is {describe(state_dict)}")
    names = ("exp_avg", "exp_avg_sq", "ema_params")
    states, groups = dict(state_dict["state"]), []
    for i, group in enumerate(state_dict["param_groups"]):
        trained = [key for key in group["params"] if "step" in states.get(key, ())]
        steps = {int(states[key]["step"]) for key in trained}
        if len(steps) > 1:
            raise ValueError(
                f"to_mindspeed_state_dict: all parameters of a group must have the same step count, but those of group"
                f" {i} have {sorted(steps)}"
            )
        for key in trained:
            missing = [name for name in names if name not in states[key]]
            if missing:
                raise ValueError(
                    f"to_mindspeed_state_dict: the state of a parameter must have {', '.join(names)}, but that of"
                    f" {key!r} has no {' and no '.join(missing)}"
                )
            states[key] = {name: states[key][name] for name in names}
        groups.append({**group, "step": torch.tensor(steps.pop() if steps else 0, dtype=torch.int64)})
    return {**state_dict, "state": states, "param_groups": groups}
