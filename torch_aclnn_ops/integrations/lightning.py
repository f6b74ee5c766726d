"""Callbacks of Lightning's ``Trainer``."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch_aclnn_ops._tensors import is_dtensor
from torch_aclnn_ops.integrations._trainers import StepReport, ema_optimizers, swapped, warn_of_initial_weights

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.optimizer import Optimizer

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import FSDPStrategy
except ImportError as error:
    raise ImportError(
        f'torch_aclnn_ops.integrations.lightning needs Lightning: pip install "lightning>=2.6" ({error})'
    ) from error

__all__ = ["EmaCallback", "ReportCallback"]


def __dir__() -> list[str]:
    return __all__


_WEIGHTS = "current_model_state"  # the key that Lightning's WeightAveraging uses


class EmaCallback(Callback):
    """Validate, test and predict with EMA weights, and checkpoint them.

    ``configure_optimizers`` must return a :class:`torch_aclnn_ops.optim.FusedEmaAdam`, possibly among other optimizers.
    Validation in ``fit``, and later loops of the same trainer, use the EMA weights; the weights are restored
    afterwards, even after an exception. ``test``, ``validate`` and ``predict`` with a ``ckpt_path`` use the weights in
    the checkpoint, and so do the loops after them, until the next ``fit``. A checkpoint's ``state_dict`` has the EMA
    weights, so ``load_from_checkpoint`` returns the model that was validated; the weights are in
    ``current_model_state``, from which ``fit(ckpt_path=...)`` resumes if the trainer has this callback; without it,
    training would continue from the EMA weights, and Lightning warns. The module's ``on_load_checkpoint`` is then
    called twice, once with each of them as ``state_dict``; EMA weights continue from the optimizer's state. Gradients
    can be clipped with every ``precision``. A warning says if the EMA weights of the whole training will still be close
    to the initial weights, because ``ema_decay`` is large. With ``ModelParallelStrategy`` (FSDP2), checkpoints need
    ``save_distributed_checkpoint=False``: one file with full tensors, written by the first rank.

    Raises:
        RuntimeError: A validation starts inside another one, or the weights are swapped or trained during one.
        ValueError: At the start of ``fit``, no optimizer has EMA weights, another callback swaps them too, or a
            ``ModelCheckpoint`` has ``save_weights_only``, with which Lightning does not call ``on_save_checkpoint``, or
            the strategy writes checkpoints of several files. Without a ``ModelCheckpoint``, the last is raised by
            ``save_checkpoint``, which also raises if ``state_dict()`` lacks or replaces trained parameters.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[EmaCallback()], logger=False, enable_checkpointing=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        self._swap: AbstractContextManager[None] | None = None
        self._has_loaded = False  # the weights of a checkpoint since the last fit

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the optimizers and the other callbacks, and enable gradient clipping."""
        self._has_loaded = False
        for optimizer in ema_optimizers(trainer.optimizers):
            # Lightning does not clip gradients for an optimizer that unscales them itself. That avoids a
            # synchronization with the device, so it stays on where there is a scaler and no clipping.
            if trainer.gradient_clip_val or trainer.scaler is None:
                optimizer._step_supports_amp_scaling = False
        if not ema_optimizers(trainer.optimizers):
            found = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise ValueError(
                f"EmaCallback: configure_optimizers must return a FusedEmaAdam, but the optimizers are: {found}"
            )
        for callback in trainer.callbacks:
            kinds = (EmaCallback, StochasticWeightAveraging, WeightAveraging)
            if callback is not self and isinstance(callback, kinds):
                raise ValueError(
                    "EmaCallback: no other callback must swap the model's weights, but there is a"
                    f" {type(callback).__name__}; remove one of them"
                )
            if isinstance(callback, ModelCheckpoint) and callback.save_weights_only:
                raise ValueError(
                    "EmaCallback: save_weights_only of ModelCheckpoint must be False, because with it Lightning does"
                    " not call on_save_checkpoint; a checkpoint's state_dict has the EMA weights anyway"
                )
        if trainer.checkpoint_callbacks:
            _check_strategy_saves_full_tensors(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the EMA weights will still be close to the initial weights at the end of the training."""
        steps = trainer.estimated_stepping_batches
        if pl_module.automatic_optimization and steps != float("inf"):
            warn_of_initial_weights(ema_optimizers(trainer.optimizers), int(steps))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap the weights with the EMA weights, unless the weights are those of a checkpoint."""
        if self._swap is not None:
            raise RuntimeError("EmaCallback: a validation begins inside another one; let the first one end")
        self._has_loaded |= trainer.state.fn != "fit" and trainer.ckpt_path is not None
        swap = swapped([] if self._has_loaded else ema_optimizers(trainer.optimizers), trainer.model)
        swap.__enter__()
        self._swap = swap

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights."""
        swap, self._swap = self._swap, None
        if swap is not None:
            swap.__exit__(None, None, None)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the weights."""
        self.on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return a state, so that Lightning warns if training resumes from the checkpoint without this callback."""
        return {"weights": _WEIGHTS}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the EMA weights as ``state_dict``, and the weights under a key of their own."""
        weights = checkpoint["state_dict"]
        _check_strategy_saves_full_tensors(trainer, weights)
        checkpoint[_WEIGHTS], checkpoint["state_dict"] = weights, dict(weights)
        optimizers = ema_optimizers(trainer.optimizers)
        _check_entries(pl_module, optimizers)
        for optimizer in optimizers:
            entries = pl_module.state_dict(keep_vars=True).items()
            averaged = {**optimizer.state, **optimizer._ema_buffers.states()}
            own = {name for name, value in entries if isinstance(value, Tensor) and value in averaged}
            is_sharded = any(map(is_dtensor, pl_module.parameters()))  # then only the first rank has weights
            copies = optimizer.ema_state_dict(pl_module, full_state_dict=is_sharded) if own else {}
            # Lightning's names of a sharded model lack the prefix of torch.compile.
            names = {name if name in weights else name.replace("_orig_mod.", ""): name for name in own}
            checkpoint["state_dict"].update({saved: copies[names[saved]] for saved in names.keys() & weights.keys()})

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Load the weights to resume ``fit``."""
        if _WEIGHTS in checkpoint and trainer.state.fn == "fit":
            of_weights = {**checkpoint, "state_dict": checkpoint[_WEIGHTS]}
            pl_module.on_load_checkpoint(of_weights)  # has changed only the EMA weights, which are in "state_dict"
            weights = of_weights["state_dict"]
            if any(map(is_dtensor, pl_module.parameters())):
                options = StateDictOptions(full_state_dict=True, strict=pl_module.strict_loading)
                set_model_state_dict(pl_module, weights, options=options)
            else:
                pl_module.load_state_dict(weights, strict=pl_module.strict_loading)


def _check_entries(module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Raise if hooks replace trained parameters in the state dict by other tensors, such as casts, or drop them."""
    entries = {id(value) for value in module.state_dict(keep_vars=True).values()}
    trained = [one for one in module.parameters() if any(one in optimizer.state for optimizer in optimizers)]
    if not all(id(one) in entries for one in trained):
        raise ValueError(
            "EmaCallback: state_dict() of the LightningModule must return its parameters, but some are missing or"
            " replaced by other tensors; remove the hook, or the override of state_dict"
        )


def _check_strategy_saves_full_tensors(trainer: Trainer, state: Mapping[str, Any] | None = None) -> None:
    """Raise for strategies whose checkpoints cannot have both weights and EMA weights, given a model's saved state."""
    if isinstance(trainer.strategy, FSDPStrategy):
        raise ValueError(
            "EmaCallback: with FSDPStrategy (FSDP1) it writes no checkpoints; use"
            " ModelParallelStrategy(save_distributed_checkpoint=False), whose models are sharded by fully_shard"
        )
    # Lightning has no public name for the option before it saves.
    is_distributed = getattr(trainer.strategy, "_save_distributed_checkpoint", False)
    if is_distributed or (state is not None and any(map(is_dtensor, state.values()))):
        raise ValueError(
            "EmaCallback: ModelParallelStrategy must have save_distributed_checkpoint=False, because Lightning saves"
            " only the weights of a distributed checkpoint as shards, not the EMA weights beside them"
        )


class ReportCallback(StepReport, Callback):
    """Log which implementation computed the calls of the first training steps, see :func:`torch_aclnn_ops.report`.

    The table is logged by the logger ``torch_aclnn_ops`` at level INFO.

    Args:
        steps: The number of batches.

    Attributes:
        report: The :class:`torch_aclnn_ops.Report` of the last call of ``fit``.

    Raises:
        ValueError: ``steps`` is not an int of at least 1.

    Example:
        >>> callback = ReportCallback(steps=2)  # Trainer(callbacks=[callback])
        >>> print(callback.report)
        no operator of torch_aclnn_ops was called
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._begin_report()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step."""
        self._end_step()

    on_exception = StepReport.on_train_end
