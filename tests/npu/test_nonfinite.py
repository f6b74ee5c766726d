"""Numbers that are infinite, nan, or near the largest that their dtype has, on an NPU."""

from torch_aclnn_ops.functional import linear_cross_entropy

import pytest
import torch

from tests import test_ema_adam as ema_adam
from tests import test_linear_cross_entropy_nonfinite as cases
from tests.npu._operators import run_adam


@pytest.mark.parametrize("ways", [{}, {"chunk_size": 2}], ids=str)
@cases.each_option
@pytest.mark.parametrize("name", [name for name in cases.CHANGES if name not in cases.SPREADING])
def test_loss_and_gradients_are_nan_where_torchs_are(name, options, ways):
    cases.assert_nan_where_torchs_are(cases.CHANGES[name], options, "npu", **ways)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("name", cases.CHANGES)
def test_gradients_of_the_fused_operators_are_nan_where_torchs_are(name, options):
    tensors, options = cases.tensors_and_options(cases.CHANGES[name], options, torch.bfloat16)
    results, expected = (
        cases.loss_and_gradients(function, tensors, options, *where)
        for function, *where in ((cases.ours.linear_cross_entropy, "npu", torch.bfloat16), (cases.torchs,))
    )
    for result, other in zip(results, expected, strict=True):
        assert result[other.isnan()].isnan().all()
        assert not result[~other.isfinite()].isfinite().any()


@pytest.mark.parametrize("scale", [1e38, -1e38])
def test_label_smoothing_survives_logits_near_the_largest_number(scale):
    cases.assert_smoothing_survives_large_logits(scale, {}, "npu")


@pytest.mark.parametrize("options", cases.LARGE_SOFTCAPS, ids=str)
def test_a_softcap_above_the_largest_number_is_a_no_op(options):
    cases.assert_a_large_softcap_leaves_the_logits(options, "mean", "npu")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["grad", *ema_adam.STATE])
def test_a_step_makes_the_same_values_nonfinite_as_on_the_cpu(name, value):
    tensors = ema_adam.make_tensors(torch.float32)
    tensors[name][0] = value
    on_npu = run_adam(tensors)
    for state, expected in ema_adam.run(tensors).items():
        torch.testing.assert_close(on_npu[state].cpu(), expected, equal_nan=True)


def test_an_ignored_row_does_not_overflow_with_a_weight_near_the_largest_number():
    weight = torch.full((5, 4), 2e38).npu().requires_grad_()
    input = torch.zeros(3, 4).npu().requires_grad_()
    target = torch.tensor([1, -100, 2]).npu()
    loss = cases.ours.linear_cross_entropy(input, weight, target, chunk_size=2)
    loss.backward()
    torch.testing.assert_close(loss.cpu(), torch.tensor(5.0).log())
    assert not weight.grad.any() and input.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"ignore_index": 1}], ids=str)
def test_a_class_out_of_range_makes_its_loss_nan_even_with_one_feature(dtype, options):
    input, weight = torch.ones(3, 1, dtype=dtype).npu(), torch.ones(160, 1, dtype=dtype).npu()
    target = torch.tensor([0, 160, options.get("ignore_index", -100)]).npu()
    losses = linear_cross_entropy(input, weight, target, reduction="none", **options)
    assert losses.isnan().tolist() == [False, True, False] and losses[2] == 0
