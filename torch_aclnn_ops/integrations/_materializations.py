"""Whether a patched model's loss was computed without logits."""

from dataclasses import dataclass


@dataclass
class Materializations:
    """Counts of the lazy logits of a forward pass, and of the losses that did not materialize them.

    Attributes:
        heads: the number of calls of linear layers that returned lazy logits.
        losses: the number of losses that were computed without logits.
        operation: the first operation that materialized logits before a loss, if any.
        is_told: whether the user was warned that the patch saves no memory.
    """

    heads: int = 0
    losses: int = 0
    operation: str | None = None
    is_told: bool = False

    def begin(self) -> None:
        """Reset the counts for a new forward pass."""
        self.heads, self.losses, self.operation = 0, 0, None

    def add(self, operation: str) -> None:
        """Record an operation that materializes logits."""
        if self.operation is None and not self.losses:
            self.operation = operation
