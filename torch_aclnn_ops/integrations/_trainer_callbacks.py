"""Callbacks of transformers' ``Trainer``."""

import warnings
from pathlib import Path
from typing import Any

from torch_aclnn_ops._checks import describe
from torch_aclnn_ops.integrations._materializations import PATCH
from torch_aclnn_ops.integrations._trainers import (
    StepReport,
    ema_optimizers,
    swapped,
    unwrapped,
    warn_of_initial_weights,
)

from transformers import TrainerCallback

FOLDER = "ema"


class EmaCallback(TrainerCallback):
    """Evaluate, predict and save with EMA weights.

    The optimizer must be :class:`torch_aclnn_ops.optim.FusedEmaAdam`, passed as ``optimizer_cls_and_kwargs`` or in
    ``optimizers``. Every call of ``trainer.evaluate()`` and ``predict()``, during and after training, uses the EMA
    weights; the weights are restored afterwards, even after an exception. Each checkpoint has the model with EMA
    weights in a folder ``ema``, or the adapters of PEFT in ``ema/adapter``, for ``from_pretrained``; its other files,
    and those of ``trainer.save_model()``, have the weights. The EMA weights are also part of the optimizer's state, so
    ``trainer.train(resume_from_checkpoint=True)`` resumes both. With ``load_best_model_at_end``, the best EMA weights
    are loaded after training, and later evaluations do not swap.

    A warning is emitted if ``ema_decay`` is so large that the EMA weights at the end of training are still close to the
    initial weights; if ``TrainingArguments.learning_rate`` is set, but the optimizer has another ``lr``, because the
    Trainer ignores ``learning_rate`` then; if training resumes from a checkpoint of ``save_only_model``, which has no
    optimizer state; and if ``compute_metrics`` gets no logits because of ``patch_model(eval_logits=False)``.

    Args:
        trainer: The trainer, because transformers does not pass it to callbacks.

    Raises:
        RuntimeError: The callback is added to another trainer than ``trainer``.
        TypeError: ``trainer`` is not a ``Trainer``.
        ValueError: At the start of training, the optimizer is not a FusedEmaAdam, or ``load_best_model_at_end`` is used
            with FSDP or DeepSpeed, which load checkpoints in another way.

    Example:
        >>> # trainer = Trainer(...); trainer.add_callback(EmaCallback(trainer))
    """

    FOLDER = FOLDER

    def __init__(self, trainer: Any = None) -> None:
        if not hasattr(trainer, "evaluation_loop"):
            raise TypeError(
                f"EmaCallback: trainer must be a transformers.Trainer, but it is {describe(trainer)}; call"
                " trainer.add_callback(EmaCallback(trainer)) after the trainer was created"
            )
        self._trainer = trainer
        self._has_best_ema_params = False
        self._evaluation_loop = trainer.evaluation_loop
        trainer.evaluation_loop = self._evaluate

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("description") == "Evaluation":  # predict() may have rows without labels, which give logits
            _warn_of_missing_logits(self._trainer)
        # The optimizer's EMA weights are the latest, not the best.
        optimizers = [] if self._has_best_ema_params else ema_optimizers([self._trainer.optimizer])
        with swapped(optimizers, self._trainer.model):
            return self._evaluation_loop(*args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the optimizer and the training arguments."""
        if self._trainer.state is not state:
            raise RuntimeError("EmaCallback: the callback is used by another trainer; create one for each trainer")
        self._has_best_ema_params = False
        optimizer = unwrapped(self._trainer.optimizer)
        if not ema_optimizers([optimizer]):
            raise ValueError(
                f"EmaCallback: the trainer's optimizer must be a FusedEmaAdam, but it is a {type(optimizer).__name__};"
                " pass optimizer_cls_and_kwargs=(FusedEmaAdam, {...}) or optimizers=(FusedEmaAdam(...), None) to the"
                " trainer"
            )
        if args.load_best_model_at_end and (self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled):
            raise ValueError(
                "EmaCallback: load_best_model_at_end must be False with FSDP and DeepSpeed; load the folder"
                f" {FOLDER!r} of trainer.state.best_model_checkpoint"
            )
        warn_of_initial_weights([optimizer], state.max_steps)
        _warn_of_lost_ema_params(optimizer, state.global_step)
        _warn_of_ignored_learning_rate(optimizer, args)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the model with EMA weights in the checkpoint."""
        [optimizer] = ema_optimizers([self._trainer.optimizer])
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        ema_params = optimizer.ema_state_dict(model, full_state_dict=True)  # a collective if the model is sharded
        # Of the trial, in a hyperparameter search; both names are private ones of transformers.
        output = getattr(self._trainer, "_get_output_dir")(getattr(self._trainer, "_trial", None))  # noqa: B009
        folder = _folder(Path(output) / f"checkpoint-{state.global_step}", model)
        # PEFT takes the embeddings of prompts from the model, not from state_dict.
        with swapped([optimizer] if _has_adapters(model) else []):
            if args.should_save:
                model.save_pretrained(folder, state_dict=ema_params)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the best EMA weights, if the trainer has loaded the best weights."""
        best = state.best_model_checkpoint
        if not args.load_best_model_at_end or best is None:
            return
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        state.best_model_checkpoint = str(_folder(Path(best), model))
        try:
            getattr(self._trainer, "_load_best_model")()  # noqa: B009  (a private name of transformers)
        finally:
            state.best_model_checkpoint = best
        self._has_best_ema_params = True


def _warn_of_lost_ema_params(optimizer: Any, step: int) -> None:
    """Warn if training resumes at a step without the state of its optimizer, as with ``save_only_model``."""
    if step > 0 and not optimizer.state:
        warnings.warn(
            f"EmaCallback: training resumes at step {step} from a checkpoint without the optimizer's state, so the"
            " moments restart, and the EMA starts from the weights; save checkpoints with save_only_model=False",
            stacklevel=2,
        )


def _warn_of_missing_logits(trainer: Any) -> None:
    """Warn if ``compute_metrics`` gets no logits, because the Trainer's model was patched to return none."""
    patches = [vars(one)[PATCH] for one in trainer.model.modules() if PATCH in vars(one)]
    # The Trainer calls the model without labels if it computes the loss itself.
    has_labels = not trainer.args.label_smoothing_factor and getattr(trainer, "compute_loss_func", None) is None
    is_generated = getattr(trainer.args, "predict_with_generate", False)
    needs_logits = trainer.compute_metrics is not None and not (trainer.args.prediction_loss_only or is_generated)
    if needs_logits and has_labels and not all(one.record.eval_logits for one in patches):
        warnings.warn(
            "EmaCallback: compute_metrics gets no logits, because patch_model was called with eval_logits=False; call"
            " patch_model(model, eval_logits=True)",
            stacklevel=2,
        )


def _warn_of_ignored_learning_rate(optimizer: Any, args: Any) -> None:
    """Warn if ``TrainingArguments.learning_rate`` is set, but the optimizer has another: the Trainer does not use it.

    The default of ``learning_rate`` cannot be distinguished from a value that was set.
    """
    is_set = args.learning_rate != type(args).__dataclass_fields__["learning_rate"].default
    for one in ema_optimizers([optimizer]):
        lr = float(one.defaults["lr"])
        rates = {lr, *(float(group.get("initial_lr", lr)) for group in one.param_groups)}
        if is_set and args.learning_rate not in rates:
            warnings.warn(
                f"TrainingArguments.learning_rate={args.learning_rate} is ignored, because the Trainer does not pass it"
                f" to the FusedEmaAdam that it gets, whose lr is {lr}; pass lr={args.learning_rate} to the optimizer",
                stacklevel=1,  # one location, so that two callbacks show it once
            )


def _has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _folder(checkpoint: Path, model: Any) -> Path:
    """Return the folder of the EMA weights in a checkpoint.

    That of adapters is one level deeper, because the Trainer loads each folder in a checkpoint that has an adapter.
    """
    return checkpoint / FOLDER / "adapter" if _has_adapters(model) else checkpoint / FOLDER


class ReportCallback(StepReport, TrainerCallback):
    """Log which implementation computed the calls of the first training steps, see :func:`torch_aclnn_ops.report`.

    The table is logged by the logger ``torch_aclnn_ops`` at level INFO.

    Args:
        steps: The number of steps.

    Attributes:
        report: The :class:`torch_aclnn_ops.Report` of the last call of ``train()``.

    Raises:
        ValueError: ``steps`` is not an int of at least 1.

    Example:
        >>> callback = ReportCallback(steps=2)  # Trainer(..., callbacks=[callback])
        >>> print(callback.report)
        no operator of torch_aclnn_ops was called
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start counting."""
        _warn_of_ignored_learning_rate(kwargs.get("optimizer"), args)
        self._begin_report()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        self._end_step()
