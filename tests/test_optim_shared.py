"""FusedEmaAdam with parameters and states in shared memory, which several processes update (Hogwild)."""

from itertools import product

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from tests._optim import Weights, assert_all_equal, averages_of, states_of, train, weights_of

_OPTIONS = {"lr": 0.1, "ema_decay": 0.9, "ema_warmup": "ratio"}
CASES = list(product([torch.float32, torch.bfloat16], [False, True], [False, True]))


def _step(trainings):
    for training in trainings:
        train(*training, [1])


@pytest.fixture(scope="module")
def trainings():
    """Trainings of each case: one whose second step another process makes, and one without others."""
    found = {}
    for dtype, is_shared_before, flatten in CASES:
        models = Weights(dtype), Weights(dtype)
        shared, alone = [(one, FusedEmaAdam(one.parameters(), **_OPTIONS, flatten=flatten)) for one in models]
        if is_shared_before:
            shared[0].share_memory()
        train(*shared, [0])
        found[dtype, is_shared_before, flatten] = shared, alone
    process = mp.get_context("spawn").Process(target=_step, args=([shared for shared, _ in found.values()],))
    process.start()
    process.join()
    assert process.exitcode == 0
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_in_another_process_counts_here(case, trainings):
    shared, alone = trainings[case]
    train(*shared, [2])
    train(*alone, range(3))
    assert_all_equal(weights_of(shared[0]), weights_of(alone[0]))
    assert_all_equal(averages_of(*shared), averages_of(*alone))
    assert_all_equal(states_of(shared[1]), states_of(alone[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_weight_follows_writes_of_another_process(dtype):
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    weight.share_memory_()
    optimizer = FusedEmaAdam([weight], lr=0.1, weight_decay=0)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.data[0] = 0.5  # without a new version, as in another process
    assert weight.tolist() == [0.5, *weight.tolist()[1:]]
    optimizer.step()
    assert weight[0].item() == pytest.approx(0.4, abs=2e-3)
    assert weight[1].item() == pytest.approx(0.7, abs=2e-3)
