"""Temporarily replace torch's functions and optimizer by those of this package."""

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from torch_aclnn_ops import functional
from torch_aclnn_ops._checks import DROP_INS
from torch_aclnn_ops._switch import Switch, lock
from torch_aclnn_ops._torch_compat.private import load_tables_of_functions
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from torch.optim.optimizer import ParamsT


class _Place(NamedTuple):
    module: ModuleType
    name: str

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


def patch(*, adamw: bool | Mapping[str, Any] = False, **functions: bool) -> "Patch":
    """Replace functions of :mod:`torch.nn.functional`, which modules of :mod:`torch.nn` call, by those of this package.

    Like :func:`unittest.mock.patch`, the result can be used in a ``with`` statement, as a decorator of a function, or
    with ``start()`` and ``stop()``. Patches may be nested: stop the most recent one first; another order raises an
    error and changes nothing. Patches apply to the whole process, including other threads, and :func:`torch.compile`
    compiles code once with and once without them.

    Code that has imported a function or AdamW by its own name (``from torch.nn.functional import mse_loss``) is not
    patched.

    Args:
        adamw: Replace :class:`torch.optim.AdamW` by :class:`torch_aclnn_ops.optim.FusedEmaAdam`, with all arguments of
            AdamW. A mapping sets options of FusedEmaAdam for all created optimizers, such as ``{"ema_decay": 0.999}``.
        **functions: Whether a drop-in of ``torch_aclnn_ops.functional`` replaces torch's function, by name, such as
            ``mse_loss=False``; ``True`` by default. Functions that torch lacks (``linear_cross_entropy`` before 2.13)
            are not added.

    Returns:
        A :class:`Patch`, which is not yet on; its ``replaced`` lists the names that it replaces.

    Raises:
        TypeError: An argument is not a bool, or ``adamw`` is neither a bool nor a mapping. Options in the mapping are
            checked when an optimizer is created.

    Example:
        >>> with patch(adamw=True) as patched:
        ...     print(torch.nn.functional.mse_loss.__module__, issubclass(torch.optim.AdamW, FusedEmaAdam))
        torch_aclnn_ops.functional.mse_loss True
        >>> torch.nn.functional.mse_loss.__module__
        'torch.nn.functional'
        >>> "torch.nn.functional.mse_loss" in patched.replaced
        True
    """
    for name in functions.keys() - DROP_INS.keys():
        accepted = ", ".join(sorted([*DROP_INS, "adamw"]))
        raise TypeError(f"patch() got an unexpected keyword argument {name!r}; accepted are {accepted}")
    wanted = {name: functions.get(name, True) for name in DROP_INS}
    for name, value in {**wanted, "adamw": isinstance(adamw, Mapping) or adamw}.items():
        if not isinstance(value, bool):
            accepted = "True, False or a dict of options" if name == "adamw" else "True or False"
            raise TypeError(f"patch: {name} must be {accepted}, but it is {value!r}")
    F = torch.nn.functional
    replacements: dict[_Place, object] = {
        _Place(F, name): getattr(functional, name)
        for name, is_wanted in wanted.items()
        if is_wanted and hasattr(F, name)
    }
    if adamw is not False:
        options = dict(adamw) if isinstance(adamw, Mapping) else {}
        replacements[_Place(torch.optim, "AdamW")] = type("AdamW", (_AdamW,), {"preset": options})
    return Patch(replacements)


class Patch(Switch):
    """The patch that :func:`patch` returns.

    Attributes:
        replaced: The names that it replaces while it is on, such as ``"torch.nn.functional.mse_loss"``.
    """

    def __init__(self, replacements: Mapping[Any, object]) -> None:
        self._replacements = replacements
        self.replaced = tuple(map(str, replacements))

    def __repr__(self) -> str:
        return f"<patch of {', '.join(self.replaced) or 'nothing'}>"

    def _begin(self) -> None:
        load_tables_of_functions()
        with lock:
            originals = {place: getattr(*place) for place in self._replacements}
            _put(self._replacements)
            _patches.append((self, originals))

    def _end(self) -> None:
        with lock:
            last, originals = _patches[-1]
            if last is not self:
                raise RuntimeError(f"patch: {self!r} is not the patch that began last; end {last!r} first")
            _put(originals)
            _patches.pop()


# The active patches, in the order in which they began, and what each has replaced.
_patches: list[tuple[Patch, dict[_Place, object]]] = []


def _put(functions: Mapping[_Place, object]) -> None:
    for place, function in functions.items():
        setattr(place.module, place.name, function)


class _AdamW(FusedEmaAdam):
    """FusedEmaAdam with AdamW's arguments, which keeps its kind of weight decay when it loads a state."""

    preset: Mapping[str, Any] = {}

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        del foreach, capturable, fused  # which choose among kernels of torch
        _check_supported({"amsgrad": amsgrad, "differentiable": differentiable})
        options = {"maximize": maximize, **self.preset, **options}
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    @staticmethod
    def _check_keys(param_group: Mapping[Any, Any], flatten: bool) -> None:
        # All other unknown keys are ignored, as by torch's AdamW.
        _check_supported(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = self.defaults["decoupled_weight_decay"]

    def __reduce__(self) -> tuple[Any, ...]:
        # The class that ``patch`` makes has no name that a pickle could look up.
        return object.__new__, (_AdamW,), self.__getstate__()


def _check_supported(options: Mapping[str, Any]) -> None:
    """Raise for options of AdamW that change its step in a way that FusedEmaAdam cannot."""
    for name in ("amsgrad", "differentiable"):
        if options.get(name):
            raise ValueError(
                f"FusedEmaAdam: {name} must be False, but it is {options[name]!r}; torch's own AdamW has it"
            )


def _signature() -> inspect.Signature:
    """Return the signature of :func:`patch` with a switch for each drop-in."""
    adamw, _ = inspect.signature(patch).parameters.values()
    switches = [inspect.Parameter(name, adamw.kind, default=True, annotation=bool) for name in DROP_INS]
    return inspect.Signature([*switches, adamw], return_annotation=Patch)


patch.__signature__ = _signature()  # type: ignore[attr-defined]
