"""Hugging Face models with the loss of this package, and the ``Trainer`` with EMA weights."""

import inspect
import logging
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar

from torch_aclnn_ops._checks import check_bool, check_memory
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._torch_compat.private import ddp_searches_outputs
from torch_aclnn_ops.integrations import _lazy_heads
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits, materialized
from torch_aclnn_ops.integrations._materializations import (
    IN_WRAPPER,
    NO_LABELS,
    PATCH,
    Materializations,
    warn,
    warn_of_reason,
)

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

try:
    from torch_aclnn_ops.integrations._trainer_callbacks import EmaCallback, ReportCallback

    from transformers import PreTrainedModel
except ImportError as error:
    raise ImportError(
        "torch_aclnn_ops.integrations.transformers needs transformers 5, and its Trainer accelerate:"
        f' pip install "transformers>=5" accelerate ({error})'
    ) from error

__all__ = ["EmaCallback", "ReportCallback", "patch_model", "unpatch_model"]


def __dir__() -> list[str]:
    return __all__


_Model = TypeVar("_Model", bound=nn.Module)
_logger = logging.getLogger("torch_aclnn_ops")


class _Patch(NamedTuple):
    """The data kept for a patched model."""

    handles: tuple[RemovableHandle, ...]
    record: Materializations


def patch_model(
    model: _Model,
    *,
    chunk_size: int | Literal["auto"] = "auto",
    max_memory: int | None = None,
    eval_logits: bool = True,
    lazy_without_labels: bool = False,
) -> _Model:
    """Make a language model compute its training loss without materializing the logits of all tokens.

    In training, ``model(input_ids, labels=labels).loss`` and its gradients are the same as without the patch. If the
    model, or its loss function, calls :func:`torch.nn.functional.cross_entropy`, the loss is computed by
    :func:`torch_aclnn_ops.functional.linear_cross_entropy`. The ``logits`` of the output are lazy: functions and
    methods of torch materialize them. They are not a tensor; ``logits.materialize()`` returns one. As the loss is
    computed without them, hooks, ``retain_grad`` and ``autograd.grad(loss, logits)`` raise. By default, the logits are
    ordinary tensors in ``eval()``, under ``no_grad``, in ``generate``, and in a call without labels.

    The patch does not depend on the architecture: the linear layers of the head, ``get_output_embeddings()``, return
    lazy logits; if the head is an embedding, linear layers of the same shape do. Logits stay lazy under factors, a
    softcap, views of full rows, casts, and the sum of a head and its LoRA adapters; any other operation materializes
    them. If the loss needs the logits, one warning at the first step gives the reason. Call this function again after
    the head was replaced or adapters were added to it. The model is changed in place; its checkpoints do not change,
    and a copy of the model is patched too. In compiled code there are no warnings, and logits that are read after the
    optimizer step are those of the new weights, without an error.

    Args:
        model: A ``transformers`` model with a language modelling head, or a PEFT model of one; before or after
            ``fully_shard``, ``get_peft_model`` and ``gradient_checkpointing_enable``, and before ``torch.compile``,
            ``DistributedDataParallel`` or another wrapper.
        chunk_size: Number of rows whose logits are materialized at a time; ``"auto"`` lets the kernels choose.
        max_memory: Bytes that may be allocated besides arguments, results and rows of the input's size, instead of
            ``chunk_size``.
        eval_logits: Return logits together with the loss in ``eval()`` and under ``no_grad``. With False, a call with
            ``labels`` computes the loss as in training and its ``logits`` are None. A ``Trainer`` with
            ``compute_metrics`` needs True: otherwise its predictions are the model's other outputs, or empty;
            :class:`EmaCallback` warns of this.
        lazy_without_labels: Return lazy logits in training without ``labels`` too, for a loss that the program computes
            itself, such as a ``Trainer``'s ``compute_loss_func`` or ``label_smoothing_factor``. It saves memory if that
            loss is the cross entropy, or ``log_softmax`` followed by ``nll_loss`` or by ``gather`` and ``sum`` over the
            classes, of rows of the logits. With False, and in a wrapper that searches the outputs for tensors
            (``fully_shard``, FSDP1, and ``DistributedDataParallel`` with ``find_unused_parameters`` or
            ``static_graph``), such a call computes the logits, with one warning.

    Returns:
        ``model``.

    Raises:
        RuntimeError: Another library has replaced the head's ``forward``.
        TypeError: ``model`` is not such a model, for instance a wrapper of one; or its head has no linear layer; or
            an option has the wrong type.
        ValueError: ``chunk_size`` or ``max_memory`` is less than 1, or both are given.

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
    inner = _pretrained_model(model, "patch_model")
    check_memory("patch_model", chunk_size, max_memory)
    check_bool("patch_model", "eval_logits", eval_logits)
    check_bool("patch_model", "lazy_without_labels", lazy_without_labels)
    linears = _linears(inner)
    if not linears:
        head = inner.get_output_embeddings()
        found = "None" if head is None else f"a {type(head).__module__}.{type(head).__name__}"
        raise TypeError(
            "patch_model: the model's head must be a torch.nn.Linear with the forward of that class, or contain one, as"
            f" PEFT's heads do, but get_output_embeddings() of this {type(inner).__name__} is {found}"
        )
    for linear in linears:
        if "forward" in vars(linear) and not _lazy_heads.is_patched(linear):
            raise RuntimeError(
                "patch_model: the forward of the model's head has already been replaced, for example by accelerate's"
                " device_map; load the model on one device, or call patch_model first"
            )
    patch = vars(inner).get(PATCH)
    if patch is None:
        before = inner.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True)
        after = inner.register_forward_hook(_end, prepend=True, with_kwargs=True, always_call=True)
        patch = _Patch((before, after), Materializations())
        setattr(inner, PATCH, patch)
    patch.record.is_told = False
    patch.record.eval_logits, patch.record.is_lazy_without_labels = eval_logits, lazy_without_labels
    for linear in linears:
        _lazy_heads.patch(linear, {"chunk_size": chunk_size, "max_memory": max_memory}, patch.record)
    names = {module: name for name, module in inner.named_modules()}
    _logger.info(
        "patch_model: in training, the logits of this %s are lazy: outputs of %s",
        type(inner).__name__,
        ", ".join(
            f"{names.get(linear, 'its head')} ({linear.in_features} x {linear.out_features})" for linear in linears
        ),
    )
    return model


def unpatch_model(model: _Model) -> _Model:
    """Undo :func:`patch_model`; a no-op for models that are not patched.

    Args:
        model: The model that was passed to :func:`patch_model`, or the model inside it.

    Returns:
        ``model``.

    Raises:
        RuntimeError: Another library has replaced the head's ``forward`` after :func:`patch_model`.
        TypeError: ``model`` is not such a model, for instance a wrapper of one.
    """
    inner = _pretrained_model(model, "unpatch_model")
    patch = vars(inner).get(PATCH)
    if patch is None:
        return model
    linears = [linear for linear in _linears(inner) if "forward" in vars(linear)]
    if not all(map(_lazy_heads.is_patched, linears)):
        raise RuntimeError(
            "unpatch_model: another library has replaced the forward of the model's head after patch_model was called;"
            " undo that first"
        )
    for linear in linears:
        del linear.forward
    for handle in patch.handles:
        handle.remove()
    delattr(inner, PATCH)
    return model


def _pretrained_model(model: nn.Module, function: str) -> Any:
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


def _linears(model: Any) -> list[nn.Linear]:
    """Return the linear layers whose outputs are logits: the head, those in it, or the model's of the head's shape."""
    head = model.get_output_embeddings()
    linears = list(_plain_linears(head))
    if not linears and isinstance(head, nn.Embedding):
        # The embeddings of tokens, which are not a head, but tied to it.
        shape = head.num_embeddings, head.embedding_dim
        linears = [one for one in _plain_linears(model) if (one.out_features, one.in_features) == shape]
    classes = max((linear.out_features for linear in linears), default=0)
    return [linear for linear in linears if linear.out_features == classes]


def _plain_linears(module: Any) -> Iterator[nn.Linear]:
    for one in module.modules() if isinstance(module, nn.Module) else ():
        if isinstance(one, nn.Linear) and type(one).forward is nn.Linear.forward:
            yield one


def _begin(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Before a forward pass, notice heads that came after the patch, and evaluations that return no logits."""
    record: Materializations = vars(model)[PATCH].record
    is_evaluation = not (model.training and torch.is_grad_enabled())
    record.is_without_logits = not record.eval_logits and is_evaluation and _has_labels(model, args, kwargs)
    if torch.compiler.is_compiling():
        return
    record.begin()
    record.is_seen = True
    if not record.is_told and model.training:
        linears = _linears(model)
        if not all(_lazy_heads.is_patched(linear, record) for linear in linears) or not linears:
            warn(
                model,
                record,
                "its head was replaced or got adapters after patch_model, as resize_token_embeddings and"
                " get_peft_model do; call patch_model again",
            )


def _end(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """After a forward pass, reset the state of the call, also if it raised: its output is then None."""
    record: Materializations = vars(model)[PATCH].record
    try:
        return None if output is None else _returned(model, record, kwargs, output)
    finally:
        record.is_seen = record.is_without_logits = False


def _returned(model: nn.Module, record: Materializations, kwargs: dict[str, Any], output: Any) -> Any:
    """Return the output with logits as the patch promises them, and warn of a loss that was computed from them."""
    # Labels may be given by position.
    has_loss = kwargs.get("labels") is not None or (isinstance(output, dict) and output.get("loss") is not None)
    is_without_logits = record.is_without_logits
    is_training = model.training and torch.is_grad_enabled()
    may_be_lazy = is_training and record.is_lazy_without_labels
    is_searched = may_be_lazy and not torch.compiler.is_compiling() and _is_searched(model)
    is_lazy = has_loss or (may_be_lazy and not is_searched)
    if torch.compiler.is_compiling():
        return _without_logits(output) if is_without_logits else output if is_lazy else _real(output)
    if record.losses:
        return _without_logits(output) if is_without_logits else output
    if (is_without_logits or is_training) and not record.is_told and not is_disabled():
        if has_loss:
            warn_of_reason(model, record, bool(kwargs.get("fused_lm_head")))
        elif record.heads and not is_lazy:
            warn(model, record, IN_WRAPPER if is_searched else NO_LABELS)
    return output if is_lazy and not has_loss else _real(output)


def _is_searched(model: nn.Module) -> bool:
    """Return whether a wrapper searches the model's outputs for tensors, to prepare the backward pass of the loss."""
    is_fsdp2 = any(isinstance(module, FSDPModule) for module in model.modules())
    is_fsdp1 = not all(isinstance(linear.weight, nn.Parameter) for linear in _linears(model))
    return is_fsdp2 or is_fsdp1 or ddp_searches_outputs()


def _has_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("labels") is not None or torch.compiler.is_compiling():
        return kwargs.get("labels") is not None
    names = list(inspect.signature(model.forward).parameters)[: len(args)]
    return "labels" in names and args[names.index("labels")] is not None


def _without_logits(output: Any) -> Any:
    """Return a model's output as if it had been made without lazy logits."""
    if isinstance(output, tuple):
        return tuple(None if isinstance(one, LazyLogits) else one for one in output)
    if isinstance(output, dict):
        return type(output)(**{name: one for name, one in output.items() if not isinstance(one, LazyLogits)})
    return output


def _real(output: Any) -> Any:
    """Return a model's output with real logits."""
    if isinstance(output, tuple):
        return tuple(map(materialized, output))
    if isinstance(output, dict):
        for name, value in output.items():
            if isinstance(value, LazyLogits):
                output[name] = materialized(value)
    return materialized(output)
