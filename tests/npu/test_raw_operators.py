"""The raw operators on an NPU: against their formulas, through each entry point, and with private formats."""

from collections import Counter

import torch_aclnn_ops
from torch_aclnn_ops import _extension, ops

import host_npu
import pytest
import torch

from tests import test_ema_adam
from tests._contract import HALF_DTYPES, Maker
from tests.npu._operators import counted_launches, each_contract, flat, good_arguments, run_adam, samples, to_npu


@pytest.mark.parametrize("contract, sample, dtype", samples())
def test_kernel_equals_the_formula_in_float64(contract, sample, dtype):
    operator = contract.OPERATOR
    arguments = sample.arguments(Maker(dtype))
    # The entry points differ only before the launch, in the same way for all samples.
    others = [operator, getattr(_extension._module, operator.name)] if sample is contract.SAMPLES[0] else []
    for entry in (operator.overload, *others):
        results = entry(*operator.complete(to_npu(arguments), {}))
        assert {result.device.type for result in flat(results)} == {"npu"}
        # The device rounds logits to 16 bits, which affects everything computed from them.
        contract.assert_right(results, arguments, dtype, 2 * contract.ROUNDINGS)


@each_contract
def test_compiled_code_calls_the_kernel(contract):
    operator = contract.OPERATOR
    sample = next(one for one in contract.CANN_SAMPLES or contract.SAMPLES)
    arguments = operator.complete(to_npu(sample.arguments(Maker(contract.CANN_DTYPES[0]))), {})
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in arguments]  # some are written to
    compiled = torch.compile(lambda *args: operator(*args), fullgraph=True, backend="aot_eager")
    before = torch_aclnn_ops.launches()
    results = flat(compiled(*copies))
    assert torch_aclnn_ops.launches()[operator.cann] == before[operator.cann] + 1
    torch.testing.assert_close(results, flat(operator(*arguments)))


@pytest.mark.parametrize("dtype, roundings", [(torch.float32, 16), *((dtype, 1) for dtype in HALF_DTYPES)])
@pytest.mark.parametrize(
    "case", [case for case in test_ema_adam.CASES if len(case.shape) <= 8], ids=lambda case: case.name
)
def test_adam_matches_float64_up_to_rounding(case, dtype, roundings):
    tensors = test_ema_adam.make_tensors(dtype, case.shape)
    on_npu = run_adam(tensors, case.step, **case.options)
    options = {**test_ema_adam.OPTIONS, **case.options}
    truths = test_ema_adam.true_states(tensors, case.step, **case.options)
    for name in test_ema_adam.STATE:
        # The device computes 1 - beta**step in float32, with cancellation.
        allowed = roundings * torch.finfo(dtype).eps * truths[name].abs().clamp(min=1) + 1e-3 * options["lr"]
        assert bool(((on_npu[name].cpu().double() - truths[name]).abs() <= allowed).all())


def test_adam_updates_strided_state_in_place_and_marks_it_as_changed():
    tensors = test_ema_adam.make_tensors(torch.float32, (6, 8))
    on_npu = {name: tensor.npu().T[::2, 1:] for name, tensor in tensors.items()}
    expected = {name: tensor.T[::2, 1:].clone() for name, tensor in tensors.items()}
    untouched = {name: tensor.T[1::2].clone() for name, tensor in tensors.items()}
    versions = {name: tensor._version for name, tensor in on_npu.items()}
    ops.apply_fused_ema_adam_(**on_npu, step=torch.tensor([7]).npu(), **test_ema_adam.OPTIONS)
    ops.apply_fused_ema_adam_(**expected, step=torch.tensor([7]), **test_ema_adam.OPTIONS)
    for name in test_ema_adam.STATE:
        torch.testing.assert_close(on_npu[name].cpu(), expected[name])
        assert torch.equal(on_npu[name]._base.cpu().T[1::2], untouched[name])
        assert on_npu[name]._version > versions[name]
    assert on_npu["grad"]._version == versions["grad"]


@each_contract
def test_each_call_launches_the_operator_of_cann_once(contract):
    arguments = to_npu(good_arguments(contract))
    with counted_launches() as launches:
        contract.OPERATOR.overload(*arguments)
    assert launches == Counter({contract.OPERATOR.cann: 1})


def test_a_deterministic_program_gets_deterministic_kernels():
    gradient, indices = torch.rand(64, 8).npu(), torch.randint(4, (64,)).npu()
    ops.embedding_dense_backward(gradient, indices, 4, -1, False)
    torch.use_deterministic_algorithms(True)
    try:
        first = ops.embedding_dense_backward(gradient, indices, 4, -1, False)
        second = ops.embedding_dense_backward(gradient, indices, 4, -1, False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first.cpu(), second.cpu())


# Inputs of CANN's 16-bit kernel that is wrong with a padding_idx: at least 100 MiB and 512 rows.
BIG = 512, 1024, 100 * 2**20 // 2 // 1024 - 512  # rows, features, weights
SIZES = {
    "at the limits": (*BIG, False, True),
    "less than 100 MiB": (512, 1024, BIG[2] - 1, False, False),
    "less than 512 rows": (511, 1024, BIG[2] + 1, False, False),
    "513 features": (512, 513, 2**17, False, True),
    "512 features": (512, 512, 2**17, False, False),
    "512 features, deterministic": (512, 512, 2**17, True, True),
    "many weights": (512, 8, 2**24 + 1, False, True),
    "few weights for few features": (512, 8, 2**24, False, False),
}


@pytest.mark.parametrize("rows, features, weights, is_deterministic, expected", SIZES.values(), ids=SIZES)
def test_embedding_gradients_for_the_kernel_with_the_padding_idx_bug_are_detected(
    rows, features, weights, is_deterministic, expected
):
    assert _extension._module.skips_padding_wrongly(rows, features, weights, is_deterministic) == expected


PADDING = {
    "16 bits": ((torch.bfloat16, *BIG, 5, False), 2**64 - 1),
    "float16": ((torch.float16, *BIG, 0, False), 2**64 - 1),
    "smaller": ((torch.bfloat16, 512, 1024, BIG[2] - 1, 5, False), 5),
    "32 bits": ((torch.float32, *BIG, 5, False), 5),
    "scaled by frequency, which CANN widens": ((torch.bfloat16, *BIG, 5, True), 5),
    "no padding": ((torch.bfloat16, *BIG, -1, False), 2**64 - 1),
}


@pytest.mark.simulator
@pytest.mark.parametrize("call, passed", PADDING.values(), ids=PADDING)
def test_padding_idx_is_not_passed_to_the_kernel_that_would_lose_gradients(call, passed):
    dtype, rows, features, weights, padding_idx, scaled = call
    gradient, indices = torch.empty(rows, features, dtype=dtype, device="npu"), torch.zeros(rows).long().npu()
    host_npu.fail("aclnnEmbeddingDenseBackwardGetWorkspaceSize", status=161001)
    with pytest.raises(RuntimeError, match=f"paddingIdx {passed}, scaleGradByFreq"):
        ops.embedding_dense_backward(gradient, indices, weights, padding_idx, scaled)


def test_the_padding_row_is_zero_without_an_extra_launch():
    rows, features, weights = BIG
    make = Maker(torch.bfloat16)
    gradient, indices = make.normal(rows, features), make.index(7, rows)
    with counted_launches() as launches:
        result = ops.embedding_dense_backward(gradient.npu(), indices.npu(), weights, 5, False)
    assert launches["aclnnEmbeddingDenseBackward"] == 1
    expected = ops.embedding_dense_backward.formula(gradient, indices, 7, 5, False)
    assert (indices == 5).any() and not expected[5].any()
    torch.testing.assert_close(result[:7].cpu(), expected)
    assert not result[7:].cpu().any()


def test_the_softmax_is_marked_as_changed():
    make = Maker(torch.bfloat16)
    softmax = torch.rand(8, 128).npu()
    version = softmax._version
    mask, target = torch.zeros(1, dtype=torch.uint8).npu(), make.index(128, 8).npu()
    arguments = torch.ones(8).npu(), make.normal(8, 3).npu(), make.normal(128, 3).npu(), mask, target
    ops.fused_linear_cross_entropy_loss_grad.overload(*arguments, None, None, softmax)
    assert softmax._version > version


def test_targets_above_float32_precision_select_the_right_column():
    # CANN compares targets with the bounds in float32, where 2**24 + 1 equals 2**24.
    start = 2**24
    input, weight = torch.ones(3, 2).half(), torch.arange(256.0).reshape(128, 2).half()
    target = torch.tensor([start - 1, start + 1, start + 128])
    arguments = (input, weight, target, start, start + 128, False)
    expected = ops.fused_linear_online_max_sum(*arguments)
    results = ops.fused_linear_online_max_sum(*to_npu(arguments))
    for result, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), truth, rtol=1e-3, atol=1e-3)


def test_a_shard_with_more_classes_than_float32_counts_is_refused():
    weight = torch.zeros(2**24 + 1, 1, dtype=torch.half, device="npu")
    with pytest.raises(RuntimeError, match="a shard must have at most 16777216 classes, but it has 16777217"):
        ops.fused_linear_online_max_sum(weight[:3], weight, torch.zeros(3).long().npu(), 0, len(weight))


@each_contract
def test_it_is_called_on_the_device_of_its_tensors_and_on_their_stream(contract):
    operator, arguments = contract.OPERATOR, good_arguments(contract)
    expected = flat(operator.overload(*to_npu(arguments)))
    last = f"npu:{torch.npu.device_count() - 1}"
    arguments = tuple(arg.to(last) if isinstance(arg, torch.Tensor) else arg for arg in arguments)
    torch.npu.synchronize(last)
    stream = torch.npu.Stream(last)
    with torch.npu.stream(stream):
        results = flat(operator.overload(*arguments))
    stream.synchronize()
    torch.npu.set_device(0)
    results += flat(operator.overload(*arguments))  # while another device is current
    assert torch.npu.current_device() == 0
    for result, truth in zip(results, expected * 2, strict=True):
        assert result.device == torch.device(last)
        torch.testing.assert_close(result.cpu(), truth.cpu())


@pytest.mark.parametrize("rank", range(9))
def test_every_supported_rank(rank):
    tensors = [torch.rand((2,) * rank) for _ in range(3)]
    expected = ops.mse_loss_backward(*tensors, 1)
    torch.testing.assert_close(ops.mse_loss_backward(*to_npu(tuple(tensors)), 1).cpu(), expected)


_NZ = 29  # a private format, for which strides are meaningless


@pytest.fixture
def make_nz():
    """Return a function that creates tensors in the format FRACTAL_NZ."""
    import torch_npu

    torch.npu.config.allow_internal_format = True
    yield lambda dtype: torch_npu.empty_with_format((64, 64), dtype=dtype, device="npu", acl_format=_NZ)
    torch.npu.config.allow_internal_format = False


@pytest.mark.parametrize("name", test_ema_adam.STATE)
def test_adam_raises_for_in_place_arguments(name, make_nz):
    tensors = {other: torch.rand(64, 64).half().npu() for other in ("grad", *test_ema_adam.STATE)}
    tensors[name] = make_nz(torch.float16)
    with pytest.raises(RuntimeError, match=f"{name}Ref is written in place, so it must not be in a private format"):
        ops.apply_fused_ema_adam_(**tensors, step=torch.tensor([1]).npu(), **test_ema_adam.OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (40, 20), (3, 17, 33)])
@pytest.mark.usefixtures("make_nz")
def test_an_input_is_cast(dtype, shape):
    import torch_npu

    grad_output, input, target = (torch.rand(shape).to(dtype).npu() for _ in range(3))
    tiled = torch_npu.npu_format_cast(grad_output, _NZ)
    assert torch_npu.get_npu_format(tiled) == _NZ
    result = ops.mse_loss_backward.overload(tiled, input, target, 0)
    assert torch.equal(result, ops.mse_loss_backward.overload(grad_output, input, target, 0))
    assert torch.equal(torch_npu.npu_format_cast(tiled, 2), grad_output)
