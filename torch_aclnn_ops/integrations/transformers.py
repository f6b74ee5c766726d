"""Hugging Face's models with the loss of this package, and its ``Trainer`` with averages of the weights."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch_aclnn_ops.integrations import _lazy_logits
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits, materialized
from torch_aclnn_ops.integrations._trainer_optimizers import averaged, averaging_optimizers, unwrapped

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

try:
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.loss.loss_utils import ForCausalLMLoss
except ImportError as error:
    raise ImportError(
        "torch_aclnn_ops.integrations.transformers needs transformers 5, and its Trainer accelerate:"
        f' pip install "transformers>=5" accelerate ({error})'
    ) from error

__all__ = ["EmaCallback", "patch_model", "unpatch_model"]

_Model = TypeVar("_Model", bound=nn.Module)
_PATCH = "_torch_aclnn_ops_patch"
_LOSS = "_loss_function"  # where a model keeps a loss_function that was assigned to it


class _Patch(NamedTuple):
    """What ``unpatch_model`` takes back of a model."""

    handle: RemovableHandle
    loss_function: Callable[..., Tensor] | None


def patch_model(model: _Model, *, chunk_size: int | str = "auto", max_memory: int | None = None) -> _Model:
    """Let a causal language model compute its training loss without the logits of all tokens.

    In training, ``model(input_ids, labels=labels).loss`` and its gradients are those of the model as it was, by
    :func:`torch_aclnn_ops.functional.linear_cross_entropy`. ``logits`` of that output is lazy: a stand-in that computes
    the logits when an operator, a method or a function of torch needs them, and costs nothing else. Without labels, in
    ``eval()``, under ``no_grad`` and in ``generate`` the logits are real, and so is the loss of what cannot be put off.

    No architecture is named: the head is ``get_output_embeddings()``, whose linear layers return lazy logits; factors
    of the logits, a softcap and the sum of a head and its LoRA adapters stay lazy, and everything else computes them.
    ``loss_function`` takes both. Call it again after the head was replaced or got adapters; until then its logits are
    real. The model is changed in place, but nothing that a checkpoint holds; a copy of it is patched too.

    Args:
        model: a ``transformers`` model with a language modelling head, or a PEFT model of one; before or after
            ``fully_shard``, ``get_peft_model`` and ``gradient_checkpointing_enable``, and before ``torch.compile``,
            ``DistributedDataParallel`` or another wrapper.
        chunk_size: rows whose logits are held at a time, ``"auto"`` for the kernels' choice.
        max_memory: bytes that may be held beyond arguments and results, instead of ``chunk_size``.

    Returns:
        ``model``.

    Raises:
        RuntimeError: the head's ``forward`` was replaced by another library.
        TypeError: ``model`` is no such model, but a wrapper of one for instance; or its head has no linear layer.
        ValueError: the model's ``loss_function`` is not the one of causal language models.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, num_key_value_heads=2)
        >>> model = patch_model(LlamaForCausalLM(config).train())
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> output = model(tokens, labels=tokens)
        >>> output.loss.backward()
        >>> output.logits
        LazyLogits(shape=(1, 3, 50), dtype=torch.float32, device=cpu)

    Source: the interface is that of ``liger_kernel.transformers``, without its list of architectures.
    """
    inner = _causal_lm(model, "patch_model")
    head = inner.get_output_embeddings()
    linears = list(_linears(head))
    if not linears:
        raise TypeError(
            "patch_model: the model's head must be a torch.nn.Linear, or have some as PEFT's heads have, but"
            f" get_output_embeddings() of this {type(inner).__name__} is a {type(head).__name__}"
        )
    for linear in linears:
        if "forward" in vars(linear) and not _is_patched(linear):
            raise RuntimeError(
                "patch_model: the forward of the model's head is replaced already, by accelerate's device_map for"
                " instance; load the model on one device, or call patch_model first"
            )
    patch = vars(inner).get(_PATCH)
    if patch is None:
        if inner.loss_function is not ForCausalLMLoss:
            raise ValueError(
                "patch_model: the model's loss_function must be transformers' ForCausalLMLoss, but that of this"
                f" {type(inner).__name__} is {inner.loss_function!r}"
            )
        handle = inner.register_forward_hook(_materialize_without_labels, prepend=True, with_kwargs=True)
        patch = _Patch(handle, vars(inner).get(_LOSS))
        setattr(inner, _PATCH, patch)
    inner.loss_function = partial(causal_lm_loss, options={"chunk_size": chunk_size, "max_memory": max_memory})
    for linear in linears:
        # A partial can be copied and pickled with its module.
        setattr(linear, "forward", partial(_lazy_logits.forward, linear))  # noqa: B010  (which mypy sees)
    return model


def unpatch_model(model: _Model) -> _Model:
    """Take back what :func:`patch_model` has done; models that are not patched stay as they are.

    Args:
        model: what :func:`patch_model` was called with, or the model inside.

    Returns:
        ``model``.

    Raises:
        RuntimeError: another library has replaced the head's ``forward`` since.
        TypeError: ``model`` is no such model, but a wrapper of one for instance.
    """
    inner = _causal_lm(model, "unpatch_model")
    patch = vars(inner).get(_PATCH)
    if patch is None:
        return model
    linears = [linear for linear in _linears(inner.get_output_embeddings()) if "forward" in vars(linear)]
    if not all(map(_is_patched, linears)):
        raise RuntimeError(
            "unpatch_model: another library has replaced the forward of the model's head since patch_model; take that"
            " back first"
        )
    for linear in linears:
        del linear.forward
    patch.handle.remove()
    if patch.loss_function is None:
        delattr(inner, _LOSS)
    else:
        inner.loss_function = patch.loss_function
    delattr(inner, _PATCH)
    return model


def _causal_lm(model: nn.Module, function: str) -> Any:
    inner: Any = model
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"{function}: model must be a transformers.PreTrainedModel, or a PEFT model of one, but it is a"
            f" {type(model).__name__}; call it before torch.compile, DistributedDataParallel, FullyShardedDataParallel,"
            " DeepSpeed or another library wraps the model"
        )
    return inner


def _linears(head: Any) -> Iterator[nn.Linear]:
    """Return the linear layers whose outputs are logits: of the head itself, and of adapters in it."""
    modules = head.modules() if isinstance(head, nn.Module) else ()
    linears = [one for one in modules if isinstance(one, nn.Linear) and type(one).forward is nn.Linear.forward]
    classes = max((linear.out_features for linear in linears), default=0)
    return (linear for linear in linears if linear.out_features == classes)


def _is_patched(linear: nn.Linear) -> bool:
    replaced = vars(linear).get("forward")
    return isinstance(replaced, partial) and replaced.func is _lazy_logits.forward


def _materialize_without_labels(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Be the hook that makes a model's logits real where nobody has asked for a loss."""
    if kwargs.get("labels") is not None:
        return output
    if isinstance(output, tuple):
        return tuple(map(materialized, output))
    if isinstance(getattr(output, "logits", None), LazyLogits):
        output.logits = output.logits.materialize()
    return output


def causal_lm_loss(
    logits: Tensor | LazyLogits,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    options: dict[str, Any],
    **kwargs: Any,
) -> Tensor:
    """Compute what transformers' ``ForCausalLMLoss`` computes, from lazy logits too.

    Args:
        logits: real or lazy, shape (B, T, vocab_size).
        labels: class indices of the same tokens, shape (B, T), not needed with ``shift_labels``.
        vocab_size: number of classes.
        num_items_in_batch: divides the sum of the losses; by default it is the number of labels that are not ignored.
        ignore_index: label of tokens that are left out.
        shift_labels: class indices of the tokens that follow, shape (B, T).
        options: of :func:`torch_aclnn_ops.functional.linear_cross_entropy`.
        **kwargs: are ignored, as ``ForCausalLMLoss`` does.

    Returns:
        The loss, 0-dim, float32.
    """
    target = shift_labels
    if target is None and labels is not None:
        target = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    # What is wrong gets transformers' error.
    if (
        target is None
        or not isinstance(logits, LazyLogits)
        or logits.is_computed
        or logits.shape[-1] != vocab_size
        or logits.shape[:-1].numel() != target.numel()
    ):
        loss: Tensor = ForCausalLMLoss(
            materialized(logits), labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
        return loss
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = logits.cross_entropy(target.to(logits.device), reduction=reduction, ignore_index=ignore_index, **options)
    if num_items_in_batch is not None:
        loss = loss / torch.as_tensor(num_items_in_batch, device=loss.device)
    return loss.float()


class EmaCallback(TrainerCallback):
    """Let a ``Trainer`` evaluate, predict and save with averaged weights.

    The optimizer is :class:`torch_aclnn_ops.optim.FusedEmaAdam`, given as ``optimizer_cls_and_kwargs``. Every call of
    ``trainer.evaluate()`` and ``predict()``, in training and by hand, uses the averages, and the weights come back
    whatever happens. Each checkpoint has a folder ``ema`` for ``from_pretrained``; the rest of it, as what
    ``trainer.save_model()`` writes, is the model with its weights. The averages are in the optimizer's state too, so
    that ``trainer.train(resume_from_checkpoint=True)`` goes on with both.

    Args:
        trainer: the trainer that gets the callback.

    Raises:
        ValueError: at the start of training, the trainer has another optimizer; or ``load_best_model_at_end``, which
            would load weights for the sake of what their averages have reached.

    Example:
        >>> def add_averages(trainer):  # Trainer(..., optimizer_cls_and_kwargs=(FusedEmaAdam, {"lr": 1e-3}))
        ...     trainer.add_callback(EmaCallback(trainer))
    """

    FOLDER = "ema"

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._evaluation_loop = trainer.evaluation_loop
        trainer.evaluation_loop = self._evaluate

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with averaged(averaging_optimizers([self._trainer.optimizer])):
            return self._evaluation_loop(*args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what would go on without averages."""
        optimizer = unwrapped(self._trainer.optimizer)
        if not averaging_optimizers([optimizer]):
            raise ValueError(
                f"EmaCallback: the trainer's optimizer must be a FusedEmaAdam, but it is a {type(optimizer).__name__};"
                " give Trainer optimizer_cls_and_kwargs=(FusedEmaAdam, ...)"
            )
        if args.load_best_model_at_end:
            raise ValueError(
                "EmaCallback: load_best_model_at_end must be False, because it loads the weights of the checkpoint"
                f" whose averages were best; load the folder {self.FOLDER!r} of trainer.state.best_model_checkpoint"
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the model with averaged weights beside the checkpoint's."""
        [optimizer] = averaging_optimizers([self._trainer.optimizer])
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        averages = optimizer.ema_state_dict(model, full_state_dict=True)  # all ranks gather, where it is sharded
        if args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / self.FOLDER
            model.save_pretrained(folder, state_dict=averages)
