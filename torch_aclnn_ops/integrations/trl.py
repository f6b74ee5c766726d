"""TRL's trainers with the head of this package, which computes their losses and log-probabilities."""

import functools
import inspect
import threading
import types
import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch_aclnn_ops import functional as F
from torch_aclnn_ops._checks import check_memory
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._tensors import is_autocast_on, is_dtensor, is_plain
from torch_aclnn_ops.functional.linear_cross_entropy.losses import OutputName
from torch_aclnn_ops.integrations._materializations import PATCH

import torch
from torch import Tensor, nn

try:
    import trl
    from trl.trainer import utils as _trl
except ImportError as error:
    raise ImportError(f'torch_aclnn_ops.integrations.trl needs TRL: pip install "trl>=1.16,<2" ({error})') from error

__all__ = ["patch_trainer", "unpatch_trainer"]


def __dir__() -> list[str]:
    return __all__


_Trainer = TypeVar("_Trainer")
_PATCH = "_torch_aclnn_ops_trl"
_NAME = "_ChunkedLogProbFunction"
_PARAMETERS = (
    "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs".split()
)
# The output of linear_cross_entropy from which each of TRL's is computed.
_OUTPUTS: dict[str, OutputName] = {
    "log_probs": "log_probabilities",
    "entropy": "entropy",
    "log_sum_sq_probs": "logsumexp",
    "mean_logits": "logsumexp",
    "is_top1": "token_accuracy",
}
_theirs: Any = getattr(_trl, _NAME, None)


@dataclass
class _Patch:
    """The data kept for a model of a patched trainer."""

    trainer: str
    options: dict[str, Any]
    is_told: bool = False  # whether the user was warned that its loss is computed from logits


class _Call(threading.local):
    """The call of a patched model that is running in this thread, if any."""

    def __init__(self) -> None:
        # Not class attributes, whose absence in an instance Dynamo would guard on.
        self.options: dict[str, Any] | None = None
        self.labels: Tensor | None = None


_call = _Call()


def patch_trainer(
    trainer: _Trainer, *, chunk_size: int | Literal["auto"] = "auto", max_memory: int | None = None
) -> _Trainer:
    """Make a trainer of TRL compute losses and log-probabilities with ``linear_cross_entropy``.

    Losses, gradients and metrics are the same as without the patch. The model and the reference model of the trainer
    must have a fused head (``trl.trainer.utils.add_fused_lm_head``), as in ``SFTTrainer``, ``DPOTrainer``,
    ``KTOTrainer``, ``GRPOTrainer`` and ``RLOOTrainer``. Instead of TRL's tiles of 4096 tokens by 32768 classes, the
    chunks of this package are used, and ignored tokens are skipped on a CPU. Generation, and code that reads logits, is
    unchanged. If the loss is computed from logits, as with label smoothing or a ``compute_loss_func``, there is one
    warning; ``patch_model(model, lazy_without_labels=True)`` saves their memory.

    Args:
        trainer: The trainer, before or after training.
        chunk_size: Number of rows whose logits are materialized at a time; ``"auto"`` lets the kernels choose.
        max_memory: Bytes that may be allocated besides arguments, results and rows of the input's size, instead of
            ``chunk_size``; the full copy of a head that TRL casts (``cast_lm_head_to_fp32``) is not counted.

    Returns:
        ``trainer``.

    Raises:
        RuntimeError: This version of TRL computes its head in another way; or the head's weights are sharded when the
            loss is computed, as with FSDP1 and ZeRO-3.
        TypeError: The trainer's model has no fused head, or its head has adapters or a quantized weight, which TRL's
            fused head does not see; or ``chunk_size`` or ``max_memory`` has the wrong type.
        ValueError: ``chunk_size`` or ``max_memory`` is less than 1, or both are given.

    Example:
        >>> from trl import SFTTrainer
        >>> # trainer = patch_trainer(SFTTrainer(model, train_dataset=rows)); trainer.train()

    Source: the head is a function of TRL's ``add_fused_lm_head``, which is called as it is.
    """
    models = _models(trainer, "patch_trainer")
    check_memory("patch_trainer", chunk_size, max_memory)
    _check_version()
    _check_sharding(trainer)
    setattr(_trl, _NAME, _Head)
    for model in models:
        _check_head(model)
    for model in models:
        if not _is_wrapped_by(model, globals()):
            _wrap(model)
        options = {"chunk_size": chunk_size, "max_memory": max_memory}
        setattr(model, _PATCH, _Patch(type(trainer).__name__, options))
    return trainer


def unpatch_trainer(trainer: _Trainer) -> _Trainer:
    """Undo :func:`patch_trainer`; a no-op for trainers that are not patched.

    Args:
        trainer: The trainer that was passed to :func:`patch_trainer`.

    Returns:
        ``trainer``.

    Raises:
        TypeError: The trainer's model has no fused head.
    """
    for model in _models(trainer, "unpatch_trainer"):
        if _PATCH in vars(model):
            setattr(model, _PATCH, None)  # compiled code would not notice that it is missing
    return trainer


def _models(trainer: Any, function: str) -> list[nn.Module]:
    """Return the models of a trainer whose heads are fused, without what PEFT and accelerate put around them."""
    models = []
    for name in ("model", "ref_model"):
        model = getattr(trainer, name, None)
        if isinstance(model, nn.Module) and hasattr(trainer, "accelerator"):
            model = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
            models.append(model.get_base_model() if hasattr(model, "get_base_model") else model)
    fused = [model for model in models if _is_wrapped_by(model, vars(_trl))]
    if not fused:
        raise TypeError(
            f"{function}: the model of this {type(trainer).__name__} has no fused head, as those of TRL's SFTTrainer,"
            " DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer have, so its loss needs the logits of all tokens;"
            " integrations.transformers.patch_model serves trainers that compute a cross_entropy of a model's labels"
        )
    return fused


def _is_wrapped_by(model: nn.Module, module: dict[str, Any]) -> bool:
    """Return whether a function of a module is among those that a model's forward calls."""
    forward = vars(model).get("forward")
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        if getattr(forward, "__globals__", None) is module:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _check_version() -> None:
    found = None if _theirs is None else list(inspect.signature(_theirs.forward).parameters)
    if found != _PARAMETERS:
        raise RuntimeError(
            f"patch_trainer: the fused head of TRL {trl.__version__} takes other arguments than that of TRL 1.16, with"
            " which this was tested; install trl==1.16.0, or train without patch_trainer"
        )


def _check_sharding(trainer: Any) -> None:
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    is_fsdp1 = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    if is_fsdp1 or is_deepspeed_zero3_enabled():
        raise RuntimeError(
            f"patch_trainer: {'FSDP1' if is_fsdp1 else 'ZeRO-3'} gathers the head's weights only in the forward pass,"
            " but their gradients are computed in the backward pass; use FSDP2 or ZeRO-2, or train without"
            " patch_trainer"
        )


def _check_head(model: Any) -> None:
    """Raise if the head is more than its weight and bias, which are all that the fused head reads."""
    head = model.get_output_embeddings()
    weight = head.weight
    if hasattr(head, "base_layer"):
        found, cure = f"has adapters ({type(head).__name__})", 'leave "lm_head" out of target_modules'
    elif not (is_plain(weight) or is_dtensor(weight)):
        found, cure = f"is quantized ({type(weight).__name__})", "leave the head out of the quantization"
    else:
        return
    raise TypeError(
        f"patch_trainer: the head of this {type(model).__name__} {found}, and TRL's fused head reads only its weight as"
        f" it is stored; {cure}, or train without the fused head"
    )


def _wrap(model: nn.Module) -> None:
    inner = vars(model)["forward"]
    # Of a copied model this function gets the copy.
    function = getattr(inner, "__func__", None)

    @functools.wraps(inner)  # generate() reads the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = inner if function is None else types.MethodType(function, self)
        patch = vars(self).get(_PATCH)
        if patch is None or is_disabled():
            return call(*args, **kwargs)
        if not kwargs.get("fused_lm_head"):
            _warn_of_logits(self, patch)
            return call(*args, **kwargs)
        _check_head(self)
        shifted = kwargs.get("shift_labels")
        before = _call.options, _call.labels
        _call.options = patch.options
        _call.labels = kwargs["labels"][:, 1:] if shifted is None else shifted
        try:
            output = call(*args, **kwargs)
        finally:
            _call.options, _call.labels = before
        patch_of_model = vars(self).get(PATCH)  # of patch_model
        if patch_of_model is not None:
            patch_of_model.record.losses += 1
        return output

    setattr(model, "forward", types.MethodType(forward, model))  # noqa: B010  (which mypy sees)


def _warn_of_logits(model: nn.Module, patch: _Patch) -> None:
    of_model = vars(model).get(PATCH)
    is_lazy = of_model is not None and of_model.record.is_lazy_without_labels
    if patch.is_told or is_lazy or not (model.training and torch.is_grad_enabled()):
        return
    patch.is_told = True
    warnings.warn(
        f"patch_trainer: this {patch.trainer} computes its loss from the logits of all tokens and saves no memory;"
        " leave out label smoothing and compute_loss_func, or also call patch_model(model, lazy_without_labels=True) of"
        " integrations.transformers, or unpatch_trainer if the trainer itself needs logits",
        stacklevel=3,
    )


class _Head:
    """Stands for TRL's ``ChunkedLogProbFunction``, and leaves models of trainers that are not patched to it."""

    @staticmethod
    def apply(*args: Any) -> Any:
        return _theirs.apply(*args) if _call.options is None else _log_probs(*args)


def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None,
    logit_scale: float,
    outputs: tuple[str, ...],
) -> tuple[Tensor | None, ...]:
    """Return what ``ChunkedLogProbFunction`` returns: for each token what ``outputs`` names, and None for the rest.

    The outputs of a float64 model are float64, where TRL's are float32.
    """
    if logit_scale <= 0:
        raise ValueError(
            f"patch_trainer: logits must be scaled by a positive number, but this model's are by {logit_scale}; call"
            " unpatch_trainer"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(
            f"patch_trainer: final_logit_softcapping must be None or positive, but it is {softcap}; call"
            " unpatch_trainer"
        )
    if _call.labels is not None and _call.labels.numel() == target.numel():
        # TRL scores ignored tokens too, and drops their results afterwards.
        target = target.masked_fill(_call.labels.reshape(-1).to(target.device) == -100, -100)
    if not is_autocast_on(hidden):
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    options = {
        **(_call.options or {}),
        "linear_bias": bias,
        "reduction": "none",
        "softcap": None if softcap is None else softcap / logit_scale,
    }
    temperature = temperature / logit_scale
    has_mean = "mean_logits" in outputs
    found: Any = F.linear_cross_entropy(
        hidden,
        weight,
        target,
        temperature=temperature,
        label_smoothing=1.0 if has_mean else 0.0,
        outputs={_OUTPUTS[name] for name in ("log_probs", *outputs)},
        **options,
    )
    # Smoothed by 1, the loss is the log-sum-exp minus the mean of the logits.
    mean = (found.logsumexp - found.loss).detach() if has_mean else None
    squares = None
    if "log_sum_sq_probs" in outputs:
        with torch.no_grad():
            doubled: Any = F.linear_cross_entropy(
                hidden, weight, target, temperature=temperature / 2, outputs=("logsumexp",), **options
            )
            squares = doubled.logsumexp - 2 * found.logsumexp
    is_top1 = found.token_accuracy > 0 if "is_top1" in outputs else None
    return found.log_probabilities, found.entropy, squares, mean, is_top1
