"""linear_kl_div with a vocabulary that is spread over two processes: the results of one process."""

import pytest
import torch
from host_npu.testing import run

from tests import _vocab_parallel_kl_div as cases
from tests._distributed import selected


@pytest.fixture(scope="module")
def found(request):
    return run(cases.results_on_cpu, 2, selected(request, "name"), device="cpu")


def check(of_ranks, name, dtype=torch.float64, **tolerances):
    """Compare what the ranks have with what one process computes."""
    assert not any(isinstance(one[name], str) for one in of_ranks), [one[name] for one in of_ranks]
    divergence, teacher, options, _ = cases.CASES.get(name, ("reverse_kl", "head", cases.REDUCED["mean"], None))
    loss, of_input, of_weight, of_bias = cases.gradients(divergence, teacher, options, dtype=dtype)
    for one in of_ranks:
        assert torch.equal(one[name][0], of_ranks[0][name][0])
        torch.testing.assert_close(one[name][:2], [loss, of_input], **tolerances)
    heads = [torch.cat([one[name][place] for one in of_ranks]) for place in (2, 3)]
    torch.testing.assert_close(heads, [of_weight, of_bias], **tolerances)


@pytest.mark.parametrize("name", [*cases.CASES, "sizes_found_by_a_collective"])
@pytest.mark.every_nth_case(5)
def test_the_results_of_one_process(found, name):
    check(found, name)


def test_the_parts_of_the_inputs_gradient_make_it(found):
    loss, of_input, *_ = cases.gradients("forward_kl", "head", {})
    for of_rank in found:
        torch.testing.assert_close(of_rank["part_of_the_inputs_gradient"][:2], [loss, of_input])


@pytest.mark.parametrize("name", cases.DIFFERENT)
def test_calls_that_differ_are_refused_on_every_rank(found, name):
    for of_rank in found:
        sentence = f"ValueError: linear_kl_div: {cases.DIFFERENT[name][1]} must be the same on every rank"
        assert of_rank[f"different {name}"].startswith(sentence)


def test_the_whole_head_on_every_rank_is_refused(found):
    sentence = "ValueError: linear_kl_div: linear_weight must be this rank's shard of the head, but it is the same on"
    assert all(of_rank["whole_head"].startswith(sentence) for of_rank in found)


def test_a_retained_graph_gives_its_gradients_again_and_no_second_derivatives(found):
    for of_rank in found:
        assert "with process_group only first derivatives are supported" in of_rank["second_backward"]


def test_compiled_code_breaks_its_graph_at_the_call(found):
    for of_rank in found:
        torch.testing.assert_close(*of_rank["compiled"])


def test_the_local_shard_of_a_head_is_refused_without_a_group(found):
    sentence = "ValueError: linear_kl_div: teacher_weight must have all classes, but it is the to_local() of a DTensor"
    assert all(of_rank["local_shard_of_a_teacher"].startswith(sentence) for of_rank in found)


def test_a_dtensor_is_refused_with_a_remedy(found):
    for of_rank in found:
        assert "linear_weight must be a plain tensor, but it is a DTensor" in of_rank["dtensor"]
        assert f"pass its {cases.GATHERED}" in of_rank["dtensor"]
        assert "pass its to_local() with process_group" in of_rank["dtensor"]


def test_the_local_tensor_of_a_dtensor_is_accepted_with_a_group(found):
    (input, weight, _), (rows, head, _) = cases.student(), cases.head_of_teacher()
    expected = cases.F.linear_kl_div(input, weight, rows, head).detach()
    for of_rank in found:
        torch.testing.assert_close(of_rank["shard_with_a_group"], expected)


@pytest.mark.parametrize("name", ["in_the_forward_pass", "lines_of_the_guide"])
def test_a_head_that_fsdp2_shards_has_torchs_loss_and_gradient_of_all_rows(found, name):
    (input, weight, _), (rows, head, _) = cases.student(), cases.head_of_teacher()
    log_probs = [torch.nn.functional.linear(*one).log_softmax(-1) for one in ((input, weight), (rows, head))]
    expected = torch.nn.functional.kl_div(*log_probs, reduction="batchmean", log_target=True)
    losses = [of_rank[name][0] for of_rank in found]
    torch.testing.assert_close(sum(losses) / len(losses), expected.detach())
    [gradient] = torch.autograd.grad(expected, weight)
    for of_rank in found:
        torch.testing.assert_close(of_rank[name][1], gradient)


@pytest.mark.parametrize("backend", ["hccl", "gloo"])
@pytest.mark.every_nth_case(2)
def test_npus_that_share_a_vocabulary_give_the_results_of_one_cpu(backend):
    of_ranks = run(cases.results_on_npu, 2, device="npu", backend=backend)
    for name in of_ranks[0]:
        check(of_ranks, name, torch.float32, rtol=1e-4, atol=1e-5)
