"""Whether a patched model's loss went without its logits."""

from dataclasses import dataclass

from torch.nn import Module

# What a patched model keeps it by, in a tuple with the field ``record``.
PATCH = "_torch_aclnn_ops_patch"


@dataclass
class Materializations:
    """What became of the lazy logits of a forward pass.

    Attributes:
        heads: how many linear layers have returned lazy logits.
        losses: how many losses were computed without logits.
        operation: the first that needed logits before, if any.
        is_told: whether the user was told that the model saves nothing.
    """

    heads: int = 0
    losses: int = 0
    operation: str | None = None
    is_told: bool = False

    def begin(self) -> None:
        """Forget the last forward pass."""
        self.heads, self.losses, self.operation = 0, 0, None

    def add(self, operation: str) -> None:
        """Note an operation that needed logits."""
        if self.operation is None and not self.losses:
            self.operation = operation


def record_of(model: Module) -> Materializations | None:
    """Return what became of the lazy logits of a model, or None if it is not patched."""
    patch = vars(model).get(PATCH)
    record: Materializations | None = None if patch is None else patch.record
    return record
