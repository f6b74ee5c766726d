"""Which features of FusedEmaAdam go with which distribution and which action, and which combinations raise.

``test_optimizer_matrix.py`` runs every cell, and ``python -m tests.optimizer_matrix`` writes docs/works_with.md.
"""

from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks._figures import write_between

PAGE = Path(__file__).parents[1] / "docs" / "works_with.md"
TITLE = "FusedEmaAdam in one process and in several"

FEATURES = {
    "float32": "float32",
    "bfloat16 with masters": "bfloat16, `master_weights=True`",
    "flatten": "`flatten=True`",
    "tied by module": "one parameter in two modules",
    "tied by storage": "two parameters over one storage (`b.data = a.data`)",
    "frozen in part": "some parameters frozen, from the start or midway",
    "tensor lr": "learning rate in a tensor, changed in-place",
    "GradScaler": "`torch.amp.GradScaler`, with a skipped step",
}
# The number of processes that train; of those that resume from their checkpoint, and how these are distributed.
WAYS = {
    "one process": (1, 2, "DDP"),
    "DDP": (2, 3, "DDP"),
    "ZeRO": (2, 3, "ZeRO"),
    "FSDP2": (2, 3, "FSDP2"),
    "FSDP2 and TP": (4, 2, "FSDP2 and TP"),
}
RESUME = "resume on other ranks"
ACTIONS = ("train", "evaluate averages", "save and resume", RESUME, "averages file")


class Outcome(NamedTuple):
    """What becomes of a cell.

    Attributes:
        mark: what the page shows.
        words: what the message of the error contains; empty where the result is right.
        note: what the page says below the table.
    """

    mark: str
    words: tuple[str, ...] = ()
    note: str = ""


class Cell(NamedTuple):
    """One combination."""

    feature: str
    way: str
    action: str

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def is_representative(self) -> bool:
        """Whether it always runs: one in eight, with every feature, every way and every action."""
        features, ways = list(FEATURES), list(WAYS)
        return (features.index(self.feature) + 3 * ways.index(self.way) + ACTIONS.index(self.action)) % 8 == 0

    @property
    def outcome(self) -> Outcome:
        """What is to become of it."""
        return next((outcome for holds, outcome in _EXCEPTIONS if holds(self)), RIGHT)


RIGHT = Outcome("✓")
UNTIED = Outcome(
    "✓ [1]",
    note="`fully_shard` and `parallelize_module` give each parameter its own memory, so the parameters are no longer"
    " tied; the result is that of one process in which they are not",
)
SHARED_MEMORY = Outcome(
    "raises [2]",
    ("FusedEmaAdam", "share memory", "(b.weight = a.weight)"),
    "the constructor raises `ValueError`, because the update of one parameter would overwrite that of the other; share"
    " the `Parameter` instead (`b.weight = a.weight`)",
)
PART_OF_ZERO = Outcome(
    "raises [3]",
    ("FusedEmaAdam", "EMA weights", "ZeroRedundancyOptimizer"),
    "`unwrap()`, and with it the calls for EMA weights, raises `RuntimeError`, because each rank has the EMA weights of"
    " its own parameters only; all of them are in the consolidated state dict",
)
NOT_CHECKED = Outcome(
    "not supported [4]",
    note="each rank's optimizer has only some of the parameters, and may not have both; share the `Parameter`",
)
_EXCEPTIONS = (
    (lambda cell: cell.feature == "tied by storage" and cell.way.startswith("FSDP2"), UNTIED),
    (lambda cell: cell.feature == "tied by storage" and cell.way != "ZeRO", SHARED_MEMORY),
    (
        lambda cell: (
            cell.feature != "tied by storage"
            and cell.way == "ZeRO"
            and cell.action in ("evaluate averages", "averages file")
        ),
        PART_OF_ZERO,
    ),
    (lambda cell: cell.feature == "tied by storage", NOT_CHECKED),
)
_INTRODUCTION = """\
Each cell is five tests of `test_optimizer_matrix`: train; evaluate the EMA weights midway and train on; save and
resume; resume on another number of ranks; write a file of EMA weights that one process loads. The result is that of
one process with `torch.optim.AdamW` in float32 and an EMA by hand, or a call raises an error before anything has
changed. Every cell runs on CPUs with gloo, and one in eight also on host NPUs with HCCL."""
CELLS = [Cell(feature, way, action) for way, action, feature in product(WAYS, ACTIONS, FEATURES)]


def page() -> str:
    """Return the table and its notes in Markdown."""
    rows = [["", *WAYS], ["---"] * (1 + len(WAYS))]
    rows += [[text, *(_marks(feature, way) for way in WAYS)] for feature, text in FEATURES.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = "\n".join(f"- {outcome.mark}: {outcome.note}." for _, outcome in _EXCEPTIONS)
    return f"{_INTRODUCTION}\n\n{table}\n\n{notes}"


def _marks(feature: str, way: str) -> str:
    """Return what becomes of the actions, in the order of their list, without repetitions."""
    return ", ".join(dict.fromkeys(Cell(feature, way, action).outcome.mark for action in ACTIONS))


if __name__ == "__main__":
    write_between(PAGE, TITLE, page())
