"""Whether a patched model's loss was computed without logits, and the warnings if it was not."""

import warnings
from dataclasses import dataclass
from typing import Any, cast

from torch_aclnn_ops._tensors import is_dtensor, is_plain

from torch import Tensor, nn

CURE = "use torch.nn.functional.cross_entropy of whole rows of the logits, or unpatch_model"
NO_LABELS = (
    "it was called in training without labels, as by a Trainer with label_smoothing_factor or compute_loss_func; call"
    " patch_model(model, lazy_without_labels=True), or pass labels to the model"
)
IN_WRAPPER = (
    "it was called in training without labels in a wrapper that searches its outputs for tensors, as fully_shard and"
    " FSDP1 do; pass labels to the model, or to DistributedDataParallel find_unused_parameters=False and"
    " static_graph=False (to a Trainer ddp_find_unused_parameters=False)"
)
# The attribute of a patched model with a tuple whose field ``record`` is a :class:`Materializations`.
PATCH = "_torch_aclnn_ops_patch"


@dataclass
class Materializations:
    """Counts of the lazy logits of a forward pass, and of the losses that did not materialize them.

    Attributes:
        heads: the number of calls of linear layers that returned lazy logits.
        losses: the number of losses that were computed without logits.
        operation: the first operation that materialized logits before a loss, if any.
        is_told: whether the user was warned that the patch saves no memory.
        is_seen: whether the hooks of the model run in this forward pass.
        eval_logits: whether evaluation returns logits together with a loss.
        is_lazy_without_labels: whether training returns lazy logits if the model returns no loss.
        is_without_logits: whether this forward pass is an evaluation that returns no logits.
    """

    heads: int = 0
    losses: int = 0
    operation: str | None = None
    is_told: bool = False
    is_seen: bool = False
    eval_logits: bool = True
    is_lazy_without_labels: bool = False
    is_without_logits: bool = False

    def begin(self) -> None:
        """Reset the counts for a new forward pass."""
        self.heads, self.losses, self.operation = 0, 0, None

    def add(self, operation: str) -> None:
        """Record an operation that materializes logits."""
        if self.operation is None and not self.losses:
            self.operation = operation
            if not self.is_seen:
                self._tell(f"{operation} materializes")

    def watch(self, logits: Tensor, operation: str) -> None:
        """Warn if the gradient of a loss passes materialized logits, such as those of an additional z-loss."""
        # Not a hook of the tensor, about which pickle would warn.
        if logits.grad_fn is not None and not self.is_told:
            logits.grad_fn.register_prehook(lambda _: self._tell(f"the gradient of a loss passes {operation} of"))

    def _tell(self, what: str) -> None:
        if not self.is_told:
            self.is_told = True
            warnings.warn(
                f"patch_model: {what} the logits of all tokens, so this loss saves no memory; {CURE}", stacklevel=3
            )


def warn_of_reason(model: nn.Module, record: Materializations, is_fused_by_trl: bool) -> None:
    """Warn of the reason why a loss needed logits, if they are those of the head."""
    head = cast(Any, model).get_output_embeddings()
    weight = getattr(head, "weight", None)
    if is_fused_by_trl:
        reason = (
            "TRL's fused head does not call the model's; call patch_trainer of torch_aclnn_ops.integrations.trl with"
            " its trainer"
        )
    elif isinstance(weight, Tensor) and not (is_plain(weight) or (record.heads and is_dtensor(weight))):
        # Adapters of such a head add to its logits.
        reason = f"the weight of its head is a {type(weight).__name__}, not a plain tensor; call unpatch_model"
    elif record.operation is not None:
        reason = f"{record.operation} needs them; {CURE}"
    elif not record.heads and model.training and not getattr(head, "training", True):
        reason = "its head is in evaluation mode; call train() of the model, or unpatch_model"
    elif not record.heads:
        reason = (
            f"its head, a {type(head).__name__}, was not called as a linear layer, the model or an adapter computes"
            " with its weights; use another adapter for the head, or unpatch_model"
        )
    else:
        return
    warn(model, record, reason)


def warn(model: nn.Module, record: Materializations, reason: str) -> None:
    """Warn that a model's loss saves no memory; callers do so once."""
    record.is_told = True
    warnings.warn(
        f"patch_model: the loss of this {type(model).__name__} is not computed by linear_cross_entropy and saves no"
        f" memory: {reason}",
        stacklevel=2,
    )
