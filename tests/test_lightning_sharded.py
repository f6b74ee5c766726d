"""EmaCallback with a model that Lightning's ModelParallelStrategy shards, in 2 processes."""

import pytest
import torch
from host_npu.testing import run

from tests import _lightning_sharded as cases


@pytest.fixture(scope="module", params=["32-true", "bf16-true"])
def found(request, tmp_path_factory):
    return run(cases.found, cases.WORLD_SIZE, str(tmp_path_factory.mktemp("sharded")), request.param)


def are_equal(state, expected):
    return state.keys() == expected.keys() and all(
        torch.equal(state[name], one.to(state[name].dtype)) for name, one in expected.items()
    )


def test_a_checkpoint_of_a_sharded_model_has_full_averages_and_weights(found):
    for of_rank in found:
        assert are_equal(of_rank["file"]["state_dict"], of_rank["averages"])
        assert are_equal(of_rank["file"]["current_model_state"], of_rank["weights"])
        assert not are_equal(of_rank["weights"], of_rank["averages"])


def test_a_resumed_training_of_a_sharded_model_ends_where_an_uninterrupted_one_does(found):
    for of_rank in found:
        for name, expected in of_rank["uninterrupted"].items():
            assert are_equal(of_rank["resumed"][name], expected)


def test_a_sharded_model_is_tested_with_the_averages_of_a_checkpoint(found):
    for of_rank in found:
        assert are_equal(of_rank["tested"], of_rank["averages"])


def test_a_checkpoint_of_a_compiled_sharded_model_has_full_averages(tmp_path):
    for state, averages in run(cases.compiled, cases.WORLD_SIZE, str(tmp_path)):
        assert are_equal(state, averages)


def test_checkpoints_of_several_files_raise_before_the_training_or_when_they_are_saved(tmp_path):
    sentence = "EmaCallback: ModelParallelStrategy must have save_distributed_checkpoint=False, because "
    for of_rank in run(cases.errors, cases.WORLD_SIZE, str(tmp_path)):
        assert [error.startswith(sentence) for error in of_rank] == [True, True]
