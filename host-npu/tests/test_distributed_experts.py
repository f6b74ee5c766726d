"""Experts distributed over two simulated NPUs: dispatched and combined tokens in float64, and refusals."""

from functools import cache

import pytest
from host_npu import testing

from tests import _distributed_experts as programs

_A2, _A3, _950 = "Ascend910B", "Ascend910_93", "Ascend950"


@cache
def _errors(program, soc):
    cases = [programs.ON_A3] if soc == _A3 else []
    return testing.run(program, programs.RANKS, *cases, device="npu", environment={"HOST_NPU_SOC": soc})


@pytest.mark.parametrize(
    ("program", "soc", "case"),
    [
        *((programs.errors, _A2, case) for case in programs.CASES),
        *((programs.errors, _A3, case) for case in programs.ON_A3),
        *((programs.exchange_errors, _950, case) for case in programs.EXCHANGES),
    ],
)
def test_tokens_go_to_their_experts_and_come_back(program, soc, case):
    for errors in _errors(program, soc):
        assert isinstance(errors[case], float), errors[case]
        assert errors[case] <= 1


REFUSED = {
    "world size": 'epWorldSize is 4, and the communicator "group_name_0" has 2 ranks',
    "rank": 'on the rank {rank} of the communicator "group_name_0"',
    "experts": "moeExpertNum is 5; CANN takes the multiples of epWorldSize, 2, up to 1024",
    "quantization": "the host NPU has the quantMode 0 and 2 only, not 1",
    "ranks of shared experts": "the host NPU has no ranks of shared experts, sharedExpertRankNum is 1",
    "algorithm": 'the host NPU has the algorithm "fullmesh" only, commAlg is "hierarchy"',
    "size": "a token has 48 elements; CANN takes the multiples of 32 up to 10240 on this chip",
    "batch": "expertIds has 6 tokens, and globalBs is 8, of 2 ranks",
    "mask of copies": "xActiveMask has shape [6, 3]; CANN takes one dimension on this chip",
    "experts that copy": "the host NPU has no experts that copy or are constant",
}


@cache
def _refusals():
    return testing.run(programs.refusals, programs.RANKS, device="npu")


@pytest.mark.parametrize("case", programs.REFUSED)
def test_what_is_not_possible_is_refused_by_a_sentence_and_the_ranks_go_on(case):
    for rank, refusals in enumerate(_refusals()):
        assert REFUSED[case].format(rank=rank) in refusals[case]


@pytest.mark.parametrize(
    ("soc", "sentences"),
    [
        (_A2, ["CANN does not have this operator on this chip"] * 2),
        (_A3, ["epWorldSize is 2; CANN takes 8 16 32 64 128 on this chip"] * 2),
        (
            _950,
            [
                "sendCounts has 3 numbers instead of 4: there are 2 experts on each of 2 ranks",
                "sendCounts counts 36 tokens instead of ",
            ],
        ),
    ],
)
def test_exchanges_that_are_not_possible_are_refused(soc, sentences):
    for refusals in testing.run(programs.exchange_refusals, 2, device="npu", environment={"HOST_NPU_SOC": soc}):
        for case, sentence in zip(programs.REFUSED_EXCHANGES, sentences, strict=True):
            assert sentence in refusals[case]


def test_ranks_that_expect_other_tokens_are_told():
    environment = {"HOST_NPU_SOC": _950}
    outcomes = testing.outcomes(programs.other_counts, 2, device="npu", timeout=60, grace=60, environment=environment)
    assert [outcome.exit_status for outcome in outcomes] == [1, 1]
    assert "AlltoAllvGroupedMatMul(send_counts=[" in f"{outcomes[0].error}\n{outcomes[0].output}"


def test_one_rank_has_nobody_to_send_to():
    (refusals,) = testing.run(programs.alone, 1, device="npu")
    assert "epWorldSize is 1; CANN takes 2 at least" in refusals["alone"]


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (programs.out_of_range, "expertIds has the index 4"),
        (programs.behind_an_inactive_one, "xActiveMask has a token that is active behind one that is not"),
    ],
)
def test_values_that_are_not_possible_end_all_ranks_with_the_reason(program, sentence):
    outcomes = testing.outcomes(program, programs.RANKS, device="npu", timeout=60, grace=60)
    assert [outcome.exit_status for outcome in outcomes] == [1, 1]
    # A rank may first report that the other one has failed.
    assert any(sentence in f"{outcome.error}\n{outcome.output}" for outcome in outcomes)
