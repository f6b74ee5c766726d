"""FusedEmaAdam in 2 and 3 processes: the weights and averages of one process."""

from functools import cache

import pytest
import torch
from host_npu.testing import run

from tests import _optim_distributed as cases
from tests._distributed import groups, selected

TOLERANCE = {"cpu": 1e-12, "npu": 2e-6}


@pytest.fixture(scope="module", params=groups(2, 3, often={("npu", 2), ("cpu", 3)}), ids=str)
def row(request):
    return request.param


@pytest.fixture(scope="module")
def found(row, request, tmp_path_factory):
    device, world_size = row
    names, folder = selected(request, "name", row=row), str(tmp_path_factory.mktemp("optim_distributed"))
    return run(cases.results, world_size, folder, names, device=device)


@cache
def _of_one_process(name):
    train = cases.adamw_then_one_process if name.endswith("of_adamw") else cases.one_process
    return train(cases.Process())


@pytest.mark.parametrize("name", cases.CASES)
def test_weights_and_averages_are_those_of_one_process(row, found, name):
    device, _ = row
    weights, averages = _of_one_process(name)
    for of_rank in found:
        assert not isinstance(of_rank[name], str), of_rank[name]
        for mine, theirs in zip([*of_rank[name][0], *of_rank[name][1]], [*weights, *averages], strict=True):
            assert mine.dtype == cases.DTYPES[device]
            torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=TOLERANCE[device])


def test_canns_operator_performs_the_steps_on_npus(row, found):
    device, _ = row
    expected = {"aclnnApplyFusedEmaAdam"} if device == "npu" else set()
    assert [of_rank["operators"] for of_rank in found] == [expected] * len(found)


def test_the_state_of_another_process_is_refused_if_its_shards_have_other_sizes(found):
    assert found[0]["state of the first"] is None
    assert found[-1]["state of the first"].startswith(
        "FusedEmaAdam.load_state_dict: exp_avg of parameter 0 of group 0 must be a real dense DTensor of [7, 5] with"
    )


def test_states_and_gradients_of_other_placements_are_refused(found):
    for of_rank in found:
        of_state, of_gradient = of_rank["other placements"]
        assert of_state.startswith("FusedEmaAdam: exp_avg must have the shape [")
        assert of_gradient.startswith("fused_ema_adam: grads[0] must have the shard [")
