"""Callbacks of transformers' ``Trainer``."""

import inspect
from pathlib import Path
from typing import Any

from torch_aclnn_ops.integrations._step_reports import StepReport
from torch_aclnn_ops.integrations._trainer_optimizers import averaged, averaging_optimizers, unwrapped

from transformers import TrainerCallback

FOLDER = "ema"


class EmaCallback(TrainerCallback):
    """Let a ``Trainer`` evaluate, predict and save with averaged weights.

    The optimizer is :class:`torch_aclnn_ops.optim.FusedEmaAdam`, given as ``optimizer_cls_and_kwargs``. Every call of
    ``trainer.evaluate()`` and ``predict()``, in training and by hand, uses the averages, and the weights come back
    whatever happens. Each checkpoint has a folder ``ema`` for ``from_pretrained``; the rest of it, as what
    ``trainer.save_model()`` writes, is the model with its weights. The averages are in the optimizer's state too, so
    that ``trainer.train(resume_from_checkpoint=True)`` continues with both. With ``load_best_model_at_end`` the model
    has the best averages after training, because these are what was evaluated, and is evaluated as it is from then on.

    Args:
        trainer: The trainer that gets the callback; by default the one whose ``callbacks`` it is among, or to which
            ``add_callback`` adds it before ``train()``.

    Raises:
        RuntimeError: The callback is used by two trainers, or by something that is no ``Trainer``.
        ValueError: At the start of training, the trainer has another optimizer; or ``load_best_model_at_end`` together
            with FSDP or DeepSpeed, whose checkpoints are loaded in another way.

    Example:
        >>> callback = EmaCallback()  # Trainer(..., callbacks=[callback])
    """

    FOLDER = FOLDER

    def __init__(self, trainer: Any = None) -> None:
        self._trainer: Any = None
        self._has_best_averages = False
        if trainer is not None:
            self._attach(trainer)

    def _attach(self, trainer: Any) -> None:
        if self._trainer is not None:
            raise RuntimeError("EmaCallback: a callback belongs to one trainer; make one for each")
        self._trainer = trainer
        self._evaluation_loop = trainer.evaluation_loop
        trainer.evaluation_loop = self._evaluate

    def _attach_to_caller(self, state: Any) -> None:
        if self._trainer is None or self._trainer.state is not state:
            self._attach(_calling_trainer(state))

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        # The averages in the optimizer are the last ones.
        optimizers = [] if self._has_best_averages else averaging_optimizers([self._trainer.optimizer])
        with averaged(optimizers):
            return self._evaluation_loop(*args, **kwargs)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the trainer."""
        self._attach_to_caller(state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise for an optimizer without averages, and for checkpoints that cannot be loaded."""
        self._has_best_averages = False
        self._attach_to_caller(state)
        optimizer = unwrapped(self._trainer.optimizer)
        if not averaging_optimizers([optimizer]):
            raise ValueError(
                f"EmaCallback: the trainer's optimizer must be a FusedEmaAdam, but it is a {type(optimizer).__name__};"
                " give Trainer optimizer_cls_and_kwargs=(FusedEmaAdam, ...)"
            )
        if args.load_best_model_at_end and (self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled):
            raise ValueError(
                "EmaCallback: load_best_model_at_end must be False with FSDP and DeepSpeed; load the folder"
                f" {FOLDER!r} of trainer.state.best_model_checkpoint"
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the model with averaged weights beside the checkpoint's."""
        [optimizer] = averaging_optimizers([self._trainer.optimizer])
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        averages = optimizer.ema_state_dict(model, full_state_dict=True)  # all ranks gather, where it is sharded
        if args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER
            model.save_pretrained(folder, state_dict=averages)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the best averages where the trainer has loaded the weights that belong to them."""
        best = state.best_model_checkpoint
        if not args.load_best_model_at_end or best is None:
            return
        state.best_model_checkpoint = str(Path(best) / FOLDER)
        try:
            getattr(self._trainer, "_load_best_model")()  # noqa: B009  (a private name of transformers)
        finally:
            state.best_model_checkpoint = best
        self._has_best_averages = True


class ReportCallback(StepReport, TrainerCallback):
    """Log which implementation computed the calls of the first training steps, see :func:`torch_aclnn_ops.report`.

    The table goes to the log ``torch_aclnn_ops`` at level INFO.

    Args:
        steps: How many steps are counted.

    Attributes:
        report: The :class:`torch_aclnn_ops.Report` of the last training.

    Raises:
        ValueError: ``steps`` is no int of at least 1.

    Example:
        >>> callback = ReportCallback(steps=2)  # Trainer(..., callbacks=[callback])
        >>> print(callback.report)
        no operator of torch_aclnn_ops was called
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count."""
        self._begin_report()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        self._end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End, if there were fewer steps."""
        self._end_report()


def _calling_trainer(state: Any) -> Any:
    """Return the trainer that calls a callback; transformers does not hand it over."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if getattr(caller, "state", None) is state and hasattr(caller, "evaluation_loop"):
            return caller
        frame = frame.f_back
    raise RuntimeError("EmaCallback: the callback must be called by a Trainer; give it one, EmaCallback(trainer)")
