"""The averages in the place of the weights: in the model itself, in a state dict, in a file."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_aclnn_ops.functional.ema_adam_kernels import local
from torch_aclnn_ops.optim import _checkpoints

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


class AveragingOptimizer(Optimizer):
    """An optimizer whose states have an average of their parameter, ``ema_params``: how to get it out and back in."""

    _holds_ema_params = False

    @contextmanager
    def swap_ema_params(self) -> Iterator[None]:
        """Let the parameters hold their averages inside a ``with`` block.

        Parameters and averages exchange their contents in place, one parameter after the other. Afterwards, also after
        an exception, the parameters have their weights back bit for bit; what was written to them inside the block is
        in their averages. Parameters that were never updated keep their weights, and buffers of the model stay as they
        are: statistics of a batch norm belong to the weights, so update them (:func:`torch.optim.swa_utils.update_bn`)
        if the model has some.

        Raises:
            RuntimeError: this is inside another ``swap_ema_params`` of the same optimizer.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> from torch_aclnn_ops.optim import FusedEmaAdam
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> with optimizer.swap_ema_params():
            ...     prediction = model(torch.ones(1, 2))
        """
        self._refuse_with_ema_params("swap_ema_params")
        exchanged: list[Exchange] = []
        self._holds_ema_params = True
        try:
            for param, state in self.state.items():
                if "ema_params" in state:
                    exchange = Exchange(param, state["ema_params"])
                    exchange.enter()
                    exchanged.append(exchange)
            yield
        finally:
            for exchange in exchanged:
                exchange.leave()
            self._holds_ema_params = False

    def ema_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state of a model with the averages for its weights, to load into such a model.

        Args:
            model: the model whose parameters are optimized here. Its buffers, and parameters that were never updated,
                are copied as they are.

        Returns:
            What ``model.state_dict()`` has, as copies, in the parameters' dtypes and on their devices.

        Raises:
            RuntimeError: this is inside ``swap_ema_params``.

        Example:
            >>> model, ema_model = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
            >>> from torch_aclnn_ops.optim import FusedEmaAdam
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> ema_model.load_state_dict(optimizer.ema_state_dict(model))
            <All keys matched successfully>
        """
        self._refuse_with_ema_params("ema_state_dict")
        return _averaged_state_dict(self.state, model)

    def save_ema_model(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write :meth:`ema_state_dict` to a file, for ``torch.load`` and ``load_state_dict``.

        The file is replaced at once, so that a program that is killed leaves the old file or the new one.

        Args:
            model: the model whose parameters are optimized here.
            path: the file, which may exist.

        Raises:
            RuntimeError: this is inside ``swap_ema_params``.
            OSError: the file cannot be written.
        """
        _save(self.ema_state_dict(model), path)

    def state_dict(self) -> dict[str, Any]:
        """Return options and state as :meth:`torch.optim.Optimizer.state_dict` does; refused in ``swap_ema_params``.

        Whether parameters are flattened makes no difference, and ``step`` is a float32 tensor, as torch has it.
        """
        self._refuse_with_ema_params("state_dict")
        return _checkpoints.with_torchs_steps(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and state as :meth:`torch.optim.Optimizer.load_state_dict` does; refused in ``swap_ema_params``.

        The state may be one of :class:`torch.optim.AdamW`, :class:`torch.optim.Adam` or MindSpeed's ``FusedEmaAdamW``,
        of flattened parameters or not. Options that are missing stay as they are. States keep float32 where the
        parameter has 16 bits. Where ``ema_params`` is missing, the average starts from the weights at the next step,
        with a warning.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: the state is of an optimizer with ``amsgrad``, or does not fit the parameters.
        """
        self._refuse_with_ema_params("load_state_dict")
        # Registered now, it comes after the hooks of others, and sees what they made of the state.
        hook = self.register_load_state_dict_pre_hook(lambda _, state: _checkpoints.prepare(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def _refuse_with_ema_params(self, method: str) -> None:
        if self._holds_ema_params:
            raise RuntimeError(
                f"{type(self).__name__}.{method}: inside swap_ema_params() the parameters hold their averages, and"
                " the state holds their weights; leave the with block first"
            )


class Exchange:
    """A parameter that holds its average for a while, and gets its weights back bit for bit.

    Args:
        param: the parameter.
        ema_param: its average, which may be of another dtype.
    """

    def __init__(self, param: Tensor, ema_param: Tensor) -> None:
        self._param, self._ema_param = local(param), local(ema_param)
        self._is_rounded = param.dtype != ema_param.dtype
        self._weights: Tensor | None = None

    @torch.no_grad()
    def enter(self) -> None:
        """Write the average to the parameter; it holds the weights meanwhile, if it can hold them exactly."""
        weights = self._param.clone()
        self._param.copy_(self._ema_param)
        if self._is_rounded:
            self._weights = weights
        else:
            self._ema_param.copy_(weights)

    @torch.no_grad()
    def leave(self) -> None:
        """Write the weights back to the parameter, and what it holds to the average."""
        held = self._param.clone()
        if self._weights is None:
            self._param.copy_(self._ema_param)
            self._ema_param.copy_(held)
            return
        self._param.copy_(self._weights)
        is_untouched = self._ema_param.to(held.dtype) == held
        self._ema_param.copy_(torch.where(is_untouched, self._ema_param, held.to(self._ema_param.dtype)))


@torch.no_grad()
def _averaged_state_dict(states: Mapping[Tensor, Mapping[str, Any]], model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict with averages for weights; tied weights stay one tensor."""
    contents = model.state_dict(keep_vars=True)
    copies: dict[int, Tensor] = {}
    for name, value in contents.items():
        if isinstance(value, Tensor):
            if id(value) not in copies:
                average = states.get(value, {}).get("ema_params", value)
                copies[id(value)] = average.detach().to(value.dtype, copy=True)
            contents[name] = copies[id(value)]
    return contents


def _save(contents: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a file so that there is the old one or the whole new one at any time."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(dict(contents), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
