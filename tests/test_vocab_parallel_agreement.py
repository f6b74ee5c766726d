"""Processes that share a vocabulary and make different calls: all raise the same error, or all results are nan."""

import math

import pytest
from host_npu.testing import run

from tests import _disagreement as cases

# With few classes, and with as many as CANN's operators need. Gloo's tensors go through the CPU.
RUNS = {
    "cpu": ("cpu", "few classes", "gloo"),
    "npu": ("npu", "few classes", "hccl"),
    "fused": ("npu", "fused", "hccl"),
    "fused, gloo": ("npu", "fused", "gloo"),
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def processes(request):
    return request.param


@pytest.fixture(scope="module")
def found(processes):
    device, kind, backend = processes
    return run(cases.results, 2, kind, device=device, backend=backend)


@pytest.fixture
def device(processes):
    return processes[0]


@pytest.fixture
def sentence(processes, name):
    return cases.CASES[name][2].format(rows=sum(cases.SIZES[processes[1]]))


def _assert_all_raise(found, name, sentence, error="ValueError"):
    for of_rank in found:
        assert of_rank[name].startswith(f"{error}: linear_cross_entropy: {sentence}"), of_rank[name]


@pytest.mark.parametrize("name", cases.CASES)
def test_every_rank_raises_for_a_mismatch_if_values_are_readable(device, found, name, sentence):
    _assert_all_raise(found, name if device == "cpu" else f"{name}, checked", sentence)


@pytest.mark.parametrize("processes", [RUNS["fused"], RUNS["fused, gloo"]], ids=str, indirect=True)
@pytest.mark.parametrize("name", cases.NOT_FUSED)
def test_every_rank_needs_the_same_operators(processes, found, name):
    _assert_all_raise(found, f"{name}, checked", f"whether CANN's operators compute the loss {cases.SAME}")
    assert all(math.isnan(value) for of_rank in found for value in of_rank[name])


@pytest.mark.parametrize("name", cases.CASES)
def test_all_results_are_nan_for_a_mismatch_if_values_are_not_readable(device, found, name, sentence):
    if device == "cpu" or name == "number of rows":  # found in the collective for vocab_sizes
        _assert_all_raise(found, name, sentence)
    else:
        assert all(math.isnan(value) for of_rank in found for value in of_rank[name])


def test_replicated_rows_may_differ_by_rounding(found):
    for of_rank in found:
        assert all(math.isfinite(value) for value in of_rank["agreeing"]), of_rank["agreeing"]


def test_equal_shards_of_a_constant_head_are_not_refused(processes, found):
    for of_rank in found:
        assert of_rank["constant head"][0] == pytest.approx(math.log(sum(cases.SIZES[processes[1]])))


@pytest.mark.parametrize("head", ["DTensor", "local"])
def test_fsdp2_shards_raise_if_each_rank_has_its_own_rows(device, found, head):
    if device == "cpu":
        _assert_all_raise(found, f"head: {head}", f"target {cases.SAME} different{cases.OWN_ROWS}")
    else:
        assert all(math.isnan(of_rank[f"head: {head}"][0]) for of_rank in found)


def test_the_local_shard_of_a_head_raises_without_process_group(found):
    sentence = "must have all classes, but it is the to_local() of a DTensor with placements (Shard(dim=0),); if it is"
    _assert_all_raise(found, "head: local alone", f"linear_weight {sentence} sharded")


def test_an_out_of_range_target_of_a_local_shard_raises_with_a_hint(device, found):
    for of_rank in found:
        value = of_rank["head: detached local alone"]
        if device == "cpu":
            hint = "If linear_weight is a shard of the head, pass process_group or fsdp_module."
            assert value.startswith("IndexError: Target 21 is out of bounds. linear_cross_entropy: target must be from")
            assert value.endswith(hint)
        else:
            assert math.isnan(value[0])


@pytest.mark.every_nth_case(3)
def test_mismatched_compiled_calls_give_nan():
    for different, same in run(cases.compiled, 2):
        assert all(map(math.isnan, different)) and all(map(math.isfinite, same))
