"""FusedEmaAdam with each feature, distributed in each way: the result of one process with AdamW, or an error.

``python -m tests.test_optimizer_matrix`` writes the table of features, distributions and actions to docs/works_with.md.
"""

from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from host_npu.testing import run

from benchmarks._figures import put_between, write_between
from tests import _optimizer_cells as cells
from tests import _optimizer_reference as reference
from tests._distributed import DEVICES

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
# The numbers of processes that train and that resume from their checkpoint, and the distribution of the latter.
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
    """The expected outcome of a cell.

    Attributes:
        mark: The mark on the page.
        words: The expected part of the error message; empty if the result is right.
        note: The note below the table on the page.
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
        """Return whether it always runs: one in eight, with every feature, every way and every action."""
        features, ways = list(FEATURES), list(WAYS)
        return (features.index(self.feature) + 3 * ways.index(self.way) + ACTIONS.index(self.action)) % 8 == 0

    @property
    def outcome(self) -> Outcome:
        """Return the expected outcome."""
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
    """Return the marks of the actions, in the order of their list, without repetitions."""
    return ", ".join(dict.fromkeys(Cell(feature, way, action).outcome.mark for action in ACTIONS))


# Gradients depend on the order of summation: in float32 by some ulps of weights below 0.5. In bfloat16 each process
# rounds its gradient, of about 1, to 8 bits, and the sum is rounded again: by 2**-9 each time, which with eps=1 moves a
# weight by lr times as much in a step.
TOLERANCES = {"float32": 1e-6, "bfloat16": reference.STEPS * reference.OPTIONS["lr"] * 2 * 2**-9}
BFLOAT16_UNIT = 2**-9  # the spacing from 1/4 to 1/2, where the largest weights and outputs are
FUNCTIONS = {
    "train": "train",
    "evaluate averages": "evaluate_averages",
    "save and resume": "save_and_resume",
    "resume on other ranks": "resume",
    "averages file": "averages_file",
}


def _cases():
    """Return all cells on CPUs and the representatives on NPUs, of which those of two ways always run."""
    for device in DEVICES:
        for cell in CELLS:
            is_stated = cell.outcome is not NOT_CHECKED
            if is_stated and (device == "cpu" or cell.is_representative):
                always_runs = cell.is_representative and (device == "cpu" or cell.way in ("ZeRO", "FSDP2"))
                marks = [] if always_runs else [pytest.mark.exhaustive]
                yield pytest.param(device, cell, id=f"{device}-{cell}", marks=marks)


@pytest.fixture(scope="module")
def results_of(request, tmp_path_factory):
    """Return a function that runs the selected cells of a way: those that resume on other ranks, or the others."""
    selected = [
        (item.callspec.params["device"], item.callspec.params["cell"])
        for item in request.session.items
        if item.path == request.path and "cell" in getattr(getattr(item, "callspec", None), "params", ())
    ]

    @cache
    def found(device, way, resumes):
        folder = str(tmp_path_factory.mktemp("matrix"))
        wanted = device, way, resumes
        chosen = [cell for of, cell in selected if (of, cell.way, cell.action == RESUME) == wanted]
        ranks, ranks_after, way_after = WAYS[way]
        calls = [("save" if resumes else FUNCTIONS[cell.action], cell.feature) for cell in chosen]
        results = run(cells.results, ranks, way, calls, folder, device=device)
        if not resumes:
            return results
        errors = {("resume", name): result for (_, name), result in results[0].items() if isinstance(result, str)}
        calls = [call for cell in chosen if (call := ("resume", cell.feature)) not in errors]
        if not calls:
            return [errors]
        resumed = run(cells.results, ranks_after, way_after, calls, folder, device=device)
        return [errors | of_rank for of_rank in resumed]

    return found


@pytest.mark.parametrize(("device", "cell"), list(_cases()))
def test_every_cell_of_the_table_holds(results_of, device, cell):
    for result in results_of(device, cell.way, cell.action == RESUME):
        found = result[FUNCTIONS[cell.action], cell.feature]
        if cell.outcome.words:
            assert isinstance(found, str), "it does not raise"
            assert not [word for word in cell.outcome.words if word not in found], found
        else:
            assert not isinstance(found, str), found
            _assert_right(cell, found)


@cache
def _expected(feature):
    return {**reference.reference(feature), "outputs": reference.outputs(feature)}


def _assert_right(cell, found):
    is_untied = cell.outcome is UNTIED
    expected = _expected(reference.UNTIED if is_untied else cell.feature)
    tolerance = TOLERANCES["bfloat16" if cell.feature == "bfloat16 with masters" else "float32"]
    dtype = expected["weights"]["a.weight"].dtype
    unit = BFLOAT16_UNIT if dtype == torch.bfloat16 else 0
    if cell.action == "averages file":
        for name, average in (found or {}).items():  # of the first process
            assert type(average) is torch.Tensor and average.dtype == dtype
            _assert_close(average, expected["averages"].get(name, expected["averages"]["a.weight"]), tolerance + unit)
        return
    for kind, tensors in found.items():
        assert tensors.keys() == expected[kind].keys()
        for name, tensor in tensors.items():
            if kind in ("masters", "averages"):
                assert tensor.dtype == torch.float32
            rounding = {"weights": unit, "outputs": 4 * unit}.get(kind, 0)
            _assert_close(tensor, expected[kind][name], tolerance + rounding)
    if "masters" in found:
        for name, weight in found["weights"].items():
            assert torch.equal(found["masters"][name].to(dtype), weight), "the weights are the masters, rounded"


def _assert_close(tensor, expected, tolerance):
    torch.testing.assert_close(tensor.float(), expected.float(), rtol=0, atol=tolerance)


def test_the_page_shows_the_table():
    written = PAGE.read_text()
    assert put_between(written, TITLE, page()) == written, "run python -m tests.test_optimizer_matrix"


if __name__ == "__main__":
    write_between(PAGE, TITLE, page())
