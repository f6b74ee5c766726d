"""Whether a patched model's loss was computed without logits."""

import warnings
from dataclasses import dataclass

from torch.nn import Module

CURE = "use torch.nn.functional.cross_entropy of whole rows of the logits, or unpatch_model"
# What a patched model keeps it by, in a tuple with the field ``record``.
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
        eval_logits: whether evaluation returns logits beside a loss.
        is_lazy_without_labels: whether training returns lazy logits if there is no loss beside them.
        is_without_logits: whether this forward pass is an evaluation that does not.
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

    def count_head(self) -> None:
        """Note that a linear layer has returned lazy logits."""
        if not self.is_seen:
            self.begin()  # as no hook does
        self.heads += 1

    def add(self, operation: str) -> None:
        """Record an operation that materializes logits."""
        if self.operation is None and not self.losses:
            self.operation = operation
            if not self.is_seen and not self.is_told:
                self.is_told = True
                warnings.warn(
                    f"patch_model: {operation} materializes the logits of all tokens, so this loss saves no memory;"
                    f" {CURE}",
                    stacklevel=2,
                )


def record_of(model: Module) -> Materializations | None:
    """Return what became of the lazy logits of a model, or None if it is not patched."""
    patch = vars(model).get(PATCH)
    record: Materializations | None = None if patch is None else patch.record
    return record
