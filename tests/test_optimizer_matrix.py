"""FusedEmaAdam with each feature, distributed in each way: the result of one process with AdamW, or an error."""

from functools import cache

import pytest
import torch
from host_npu.testing import run

from benchmarks._figures import put_between
from tests import _optimizer_cells as cells
from tests import _optimizer_reference as reference
from tests import optimizer_matrix as matrix
from tests._distributed import DEVICES

# Gradients depend on the order of summation: in float32 by some units in the last place of weights below 0.5. In
# bfloat16 each process rounds its gradient, of about 1, to 8 bits, and so does their sum: by 2**-9 each time, which
# with eps=1 moves a weight by lr times as much in a step.
TOLERANCES = {"float32": 1e-6, "bfloat16": reference.STEPS * reference.OPTIONS["lr"] * 2 * 2**-9}
BFLOAT16_UNIT = 2**-9  # between neighbours from 1/4 to 1/2, where the largest weights and outputs are
FUNCTIONS = {
    "train": "train",
    "evaluate averages": "evaluate_averages",
    "save and resume": "save_and_resume",
    "resume on other ranks": "resume",
    "averages file": "averages_file",
}


def _tolerance(feature):
    return TOLERANCES["bfloat16" if feature == "bfloat16 with masters" else "float32"]


def _cases():
    """Return all cells on CPUs and the representatives on NPUs, of which those of two ways always run."""
    for device in DEVICES:
        for cell in matrix.CELLS:
            is_stated = cell.outcome is not matrix.NOT_CHECKED
            if is_stated and (device == "cpu" or cell.is_representative):
                always_runs = cell.is_representative and (device == "cpu" or cell.way in ("ZeRO", "FSDP2"))
                marks = [] if always_runs else [pytest.mark.exhaustive]
                yield pytest.param(device, cell, id=f"{device}-{cell}", marks=marks)


@pytest.fixture(scope="module")
def results_of(request, tmp_path_factory):
    """Return a function that runs the selected cells of a way that resume on other ranks, or the others."""
    selected = [
        (item.callspec.params["device"], item.callspec.params["cell"])
        for item in request.session.items
        if item.path == request.path and "cell" in getattr(getattr(item, "callspec", None), "params", ())
    ]

    @cache
    def found(device, way, resumes):
        folder = str(tmp_path_factory.mktemp("matrix"))
        wanted = device, way, resumes
        chosen = [cell for of, cell in selected if (of, cell.way, cell.action == matrix.RESUME) == wanted]
        ranks, ranks_after, way_after = matrix.WAYS[way]
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
    for result in results_of(device, cell.way, cell.action == matrix.RESUME):
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
    is_untied = cell.outcome is matrix.UNTIED
    expected = _expected(reference.UNTIED if is_untied else cell.feature)
    tolerance = _tolerance(cell.feature)
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
    written = matrix.PAGE.read_text()
    assert put_between(written, matrix.TITLE, matrix.page()) == written, "run python -m tests.optimizer_matrix"
