"""FusedEmaAdam in 2 and 3 processes: the weights and averages of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest

from tests import _optim_distributed as trainings


@pytest.fixture(scope="module")
def expected():
    model = trainings.make_model()
    optimizer = FusedEmaAdam(model.parameters(), **trainings.OPTIONS)
    trainings.train(model, optimizer, range(6))
    return trainings.found(model, optimizer)


@pytest.fixture(scope="module", params=[2, 3], ids=lambda world_size: f"{world_size} processes")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, "-m", "tests._optim_distributed", str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank), str(request.param)], cwd=Path(__file__).parents[1])
        for rank in range(request.param)
    ]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0] * request.param
    finally:
        for process in processes:
            process.kill()
    return json.loads((folder / "results.json").read_text())


def _flat(nested):
    return [number for item in nested for number in (_flat(item) if isinstance(item, list) else [item])]


@pytest.mark.parametrize("training", trainings.ALL, ids=lambda training: training.__name__)
def test_weights_and_averages_are_those_of_one_process(results, expected, training):
    for of_kind, expected_of_kind in zip(results[training.__name__], expected, strict=True):
        assert _flat(of_kind) == pytest.approx(_flat(expected_of_kind), rel=0, abs=1e-12)
