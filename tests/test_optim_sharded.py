"""Averages of a model sharded by FSDP: swapped in, exported and written, in 4 processes."""

import re
from functools import cache

import pytest
import torch
from host_npu.testing import run

from tests import _fsdp_models as models
from tests import _optim_sharded as cases
from tests._distributed import DEVICES, selected

SIZE = 4
# On NPUs: one of each kind, those that affect host memory, and collectives of two groups.
ALWAYS_ON_NPUS = (*models.OF_EACH_KIND, "CPU offload", models.OFFLOADED_FSDP1, "FSDP and TP")
ON_EACH_DEVICE = [
    pytest.param(device, name, marks=pytest.mark.exhaustive if device == "npu" and name not in ALWAYS_ON_NPUS else ())
    for device in DEVICES
    for name in models.flavours_on(device)
]
TOLERANCE = {"mixed precision": 3e-2}


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Return a function that returns the results of a case on a device, by rank."""

    @cache
    def of_device(device):
        folder = str(tmp_path_factory.mktemp("optim_sharded"))
        flavours, others = (selected(request, argument, device=device) for argument in ("flavour", "case"))
        return run(cases.results, SIZE, folder, flavours, others, device=device)

    def of_case(device, name):
        found = [of_rank[name] for of_rank in of_device(device)]
        assert not any(isinstance(result, str) for result in found), found
        return found

    return of_case


on_each_device = pytest.mark.parametrize("device", DEVICES)
with_each_flavour = pytest.mark.parametrize(("device", "flavour"), ON_EACH_DEVICE)
of_each_kind = pytest.mark.parametrize("flavour", models.OF_EACH_KIND)


@cache
def _of_one_process():
    return cases.evaluations(models.Process())


def _assert_close(mine, expected, flavour=""):
    torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCE.get(flavour, 5e-6))


@with_each_flavour
def test_a_sharded_model_uses_the_averages_in_a_swap_and_the_weights_afterwards(device, flavour, found):
    _assert_close([of_rank["evaluations"] for of_rank in found(device, flavour)], [_of_one_process()] * SIZE, flavour)


@with_each_flavour
def test_a_failing_evaluation_restores_the_weights(device, flavour, found):
    assert all(torch.equal(one["weights"], one["weights after a failure"]) for one in found(device, flavour))


@on_each_device
def test_a_prefetched_all_gather_is_discarded_by_the_swap(device, found):
    expected = {name: _of_one_process()[name] for name in ("averages", "weights")}
    _assert_close(found(device, "gather in flight"), [expected] * SIZE)


@on_each_device
@of_each_kind
def test_a_swap_inside_a_forward_pass_raises_and_changes_nothing(device, flavour, found):
    for errors, (before, during, after) in found(device, f"inside a forward pass: {flavour}"):
        [error] = errors
        assert re.match(
            r"FusedEmaAdam\.swap_ema_params: FSDP is in a forward or backward pass, or in summon_full_params\(\), of"
            r" parameters \[2, .*\] of group 0;",
            error,
        )
        assert torch.equal(before, during) and torch.equal(before, after)


@pytest.mark.parametrize(
    ("device", "case", "expected"),
    [
        ("cpu", "compiled", "weights"),
        pytest.param("npu", "compiled", "weights", marks=pytest.mark.exhaustive),  # takes half of the time
        *((device, "resumed from AdamW", "weights after a step") for device in DEVICES),
    ],
)
def test_other_steps_give_the_weights_of_one_process(device, case, expected, found):
    if case == "compiled" and not cases.COMPILES:
        pytest.skip("this torch cannot compile it")
    _assert_close(found(device, case), [_of_one_process()[expected]] * SIZE)


@on_each_device
def test_states_and_gradients_of_other_shards_are_refused(device, found):
    first, *_, (error, is_unchanged) = found(device, "state of the first")
    assert first is None and is_unchanged
    assert "of group 0 must be a real dense DTensor of [6, 8] with the shard" in error
    for of_state, of_gradient in found(device, "other placements"):
        assert of_state.startswith("FusedEmaAdam: 'exp_avg' must have the shape [2, 5] of parameter 0 of group 0")
        assert of_gradient.startswith("fused_ema_adam: grads[0] must have the shard [")


@on_each_device
def test_a_swap_of_fsdp1_needs_the_model(device, found):
    for (of_none, of_a_part), before, after in found(device, "without the model"):
        model = "FusedEmaAdam.swap_ema_params: model must be the FullyShardedDataParallel that has all parameters"
        assert of_none.startswith(f"{model} of the optimizer, but it is None; pass the one that has parameters [0, ")
        assert of_a_part.startswith(
            f"{model} of the optimizer, but it lacks some; pass the one that has parameters [2, "
        )
        assert torch.equal(before, after)


@with_each_flavour
def test_one_file_has_the_full_averages_for_every_rank(device, flavour, found):
    plain = models.new_model()
    for of_rank in found(device, flavour):
        contents = of_rank["contents"]
        assert {type(value) for value in contents.values()} == {torch.Tensor}
        assert of_rank["is tied"]
        plain.load_state_dict(contents)
        _assert_close(models.Process().evaluated(plain), of_rank["averages"], flavour)
        assert (of_rank["averages"] - of_rank["weights"]).abs().max() > 0.2


@on_each_device
@of_each_kind
def test_a_failed_save_raises_oserror_on_every_rank_and_the_next_call_works(device, flavour, found):
    first, *others = found(device, f"not saved: {flavour}")
    assert "No such file or directory" in first[0]
    for error, _, _ in others:
        assert re.match(r"save_ema_model: the rank that writes '.*/ema\.pt' failed \(FileNotFoundError: ", error)


@on_each_device
@of_each_kind
def test_a_full_state_dict_is_on_the_cpu_of_the_first_rank_alone(device, flavour, found):
    (_, contents, devices), *others = found(device, f"not saved: {flavour}")
    assert contents.keys() == models.new_model().state_dict().keys() and devices == {"cpu"}
    assert [contents for _, contents, _ in others] == [{}] * (SIZE - 1)


@on_each_device
def test_a_rank_without_memory_for_the_gathered_tensors_raises_on_every_rank(device, found):
    first, *others = found(device, "lacking memory")
    assert first == ("not enough memory",)
    assert all(error.endswith("failed (RuntimeError: not enough memory)") for (error,) in others)


@with_each_flavour
def test_a_state_dict_of_averages_loads_into_the_model_with_the_same_shards(device, flavour, found):
    for of_rank in found(device, flavour):
        assert torch.equal(of_rank["loaded"], of_rank["averages"])
        assert not torch.equal(of_rank["loaded"], of_rank["weights"])


@on_each_device
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_inf_in_the_shard_of_one_process_skips_the_step_of_all(device, use_orig_params, found):
    assert found(device, f"scaled: {use_orig_params}") == [[(True, 4.0), (False, 2.0)]] * SIZE
