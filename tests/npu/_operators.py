"""The raw operators' tables of tests/, and what of them runs on an NPU."""

import re
from typing import Any

from torch_aclnn_ops import host_npu, ops

import pytest
import torch
from torch import Tensor

from tests import test_binary_cross_entropy, test_embedding, test_linear_cross_entropy_operators, test_mse_loss
from tests._contract import HALF_DTYPES, Maker
from tests._raw_operator import RawOperatorContract, Sample

CONTRACTS: list[type[RawOperatorContract]] = [
    test_mse_loss.TestRawOperator,
    test_binary_cross_entropy.TestRawOperator,
    test_embedding.TestRawOperator,
    test_linear_cross_entropy_operators.TestOnlineMaxSum,
    test_linear_cross_entropy_operators.TestLossWithMaxSum,
    test_linear_cross_entropy_operators.TestLossGrad,
]

# CANN multiplies matrices of 16 bits only.
_16_BIT_OPERATORS = (ops.fused_linear_online_max_sum, ops.fused_linear_cross_entropy_loss_grad)


def _softmax_of_128_classes(make: Maker) -> tuple[Any, ...]:
    input, weight, target = make.normal(11, 3), make.normal(128, 3), make.index(128, 11)
    maximum, total, _, mask, masked, logits = ops.fused_linear_online_max_sum(input, weight, target, 16, 112, True)
    _, softmax = ops.fused_cross_entropy_loss_with_max_sum(maximum, total, maximum, logits)
    return make.normal(11).to(softmax.dtype), input, weight, mask, masked, None, None, softmax


MORE_SAMPLES: dict[type[RawOperatorContract], tuple[Sample, ...]] = {
    test_linear_cross_entropy_operators.TestLossGrad: (Sample("softmax of 128 classes", _softmax_of_128_classes),),
}


def dtypes_of(contract: type[RawOperatorContract]) -> tuple[torch.dtype, ...]:
    return HALF_DTYPES if contract.OPERATOR in _16_BIT_OPERATORS else (torch.float32, *HALF_DTYPES)


def samples() -> list[Any]:
    return [
        pytest.param(contract, sample, dtype, id=f"{contract.OPERATOR.name}-{sample.name}-{dtype}")
        for contract in CONTRACTS
        for sample in (*contract.SAMPLES, *MORE_SAMPLES.get(contract, ()))
        for dtype in dtypes_of(contract)
        if fits_cann(contract, sample.arguments(Maker(dtype)))
    ]


def refusals() -> list[Any]:
    return [
        pytest.param(contract, refusal, id=f"{contract.OPERATOR.name}-{refusal.name}")
        for contract in CONTRACTS
        for refusal in contract.REFUSALS
    ]


def fits_cann(contract: type[RawOperatorContract], arguments: tuple[Any, ...]) -> bool:
    """Return whether CANN takes a sample: at most 8 dimensions, and softmaxes of at least 128 classes."""
    if contract.OPERATOR is ops.fused_linear_cross_entropy_loss_grad and isinstance(arguments[-1], Tensor):
        return arguments[-1].dim() != 2 or arguments[-1].shape[1] >= 128
    return all(arg.dim() <= 8 for arg in arguments if isinstance(arg, Tensor))


def to_npu(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy tensors to the NPU, with their strides."""
    return tuple(_to_npu(arg) if isinstance(arg, Tensor) else arg for arg in arguments)


def _to_npu(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor.npu()
    # A view into the storage of the copy, with the offset and the strides of the original.
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.npu().as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def flat(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def meaning_of(status: int) -> str:
    """Return how a refusal with a status is put in words."""
    one = torch.rand(2).npu()
    host_npu.fail("aclnnMseLossBackwardGetWorkspaceSize", status=status, message="asked for by a test")
    with pytest.raises(RuntimeError) as caught:
        ops.mse_loss_backward(one, one, one, 0)
    found = re.search(rf"GetWorkspaceSize returned {status}, (.+?)\)\.\n", str(caught.value))
    assert found is not None, caught.value
    return found[1]


def good_call(contract: type[RawOperatorContract]) -> None:
    """Call the operator with arguments that it accepts, and read the result."""
    arguments = to_npu(contract.SAMPLES[0].arguments(Maker(dtypes_of(contract)[0])))
    for output in flat(contract.OPERATOR.overload(*arguments)):
        output.cpu()
