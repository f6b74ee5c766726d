"""``FusedEmaAdam``, conversion of its checkpoints, and access to it inside wrappers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch_aclnn_ops._checks import describe, raise_for_missing_names
from torch_aclnn_ops.optim.fused_ema_adam import FusedEmaAdam

import torch

__all__ = ["FusedEmaAdam", "to_mindspeed_state_dict", "unwrap"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:
    __getattr__ = raise_for_missing_names(__name__, torch.optim)


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


def unwrap(optimizer: torch.optim.Optimizer) -> FusedEmaAdam:
    """Return the :class:`FusedEmaAdam` inside wrappers, to call its own methods, such as ``swap_ema_params()``.

    A wrapper has the wrapped optimizer as ``optimizer`` or ``optim``, for example the result of
    ``accelerator.prepare``. That of a :class:`torch.distributed.optim.ZeroRedundancyOptimizer` is not returned, because
    it has only the parameters and EMA weights of its rank.

    Args:
        optimizer: A wrapper, or the optimizer itself.

    Raises:
        RuntimeError: ``optimizer`` is a ``ZeroRedundancyOptimizer``.
        TypeError: There is no ``FusedEmaAdam`` inside.

    Example:
        >>> import torch
        >>> optimizer = FusedEmaAdam(torch.nn.Linear(2, 1).parameters())
        >>> unwrap(optimizer) is optimizer
        True
    """
    inner: object = optimizer
    while not isinstance(inner, FusedEmaAdam):
        if hasattr(inner, "consolidate_state_dict"):
            raise RuntimeError(
                f"unwrap: optimizer must have the EMA weights of all parameters, but the FusedEmaAdam in a"
                f" {type(inner).__name__} has those of its rank; after consolidate_state_dict(), its state_dict() has"
                " all of them as 'ema_params'"
            )
        inner = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
        if inner is None:
            raise TypeError(
                f"unwrap: optimizer must be a FusedEmaAdam or have one inside, but it is {describe(optimizer)}"
            )
    return inner
