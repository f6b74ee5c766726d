"""The raw operators' tables of tests/, selected for an NPU, and arguments of the linear cross entropy."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch_aclnn_ops
from torch_aclnn_ops import ops

import host_npu
import pytest
import torch
from torch import Tensor

from tests import test_ema_adam
from tests._contract import Maker, tables_of
from tests._raw_operator import RawOperatorContract, flat

CONTRACTS = tables_of(RawOperatorContract)


def _each(contracts: list[type[RawOperatorContract]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("contract", contracts, ids=lambda contract: contract.OPERATOR.name)


each_contract = _each(CONTRACTS)
each_differentiable = _each([one for one in CONTRACTS if not one.OPERATOR.is_mutable])
each_mutable = _each([one for one in CONTRACTS if one.OPERATOR.is_mutable])


def samples() -> list[Any]:
    return [
        pytest.param(contract, sample, dtype, id=f"{contract.OPERATOR.name}-{sample.name}-{dtype}")
        for contract in CONTRACTS
        for sample in (*contract.SAMPLES, *contract.CANN_SAMPLES)
        for dtype in contract.CANN_DTYPES
        if contract.fits_cann(*sample.arguments(Maker(dtype)))
    ]


def error_inputs() -> list[Any]:
    return [
        pytest.param(contract, error_input, id=f"{contract.OPERATOR.name}-{error_input.name}")
        for contract in CONTRACTS
        for error_input in contract.ERROR_INPUTS
    ]


def to_npu(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy tensors to the NPU with their strides; a tensor that is passed twice is copied once."""
    copies = {id(arg): _to_npu(arg) for arg in arguments if isinstance(arg, Tensor)}
    return tuple(copies.get(id(arg), arg) for arg in arguments)


def _to_npu(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor.npu()
    # A view of the copied storage, with the original's offset and strides.
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.npu().as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def good_arguments(contract: type[RawOperatorContract]) -> tuple[Any, ...]:
    """Return arguments on the CPU that an operator accepts on an NPU."""
    return contract.SAMPLES[0].arguments(Maker(contract.CANN_DTYPES[0]))


def run_adam(tensors: dict[str, Tensor], step: int = 7, **options: Any) -> dict[str, Tensor]:
    """Call apply_fused_ema_adam_ on an NPU with copies of these tensors, and return them."""
    on_npu = {name: tensor.npu() for name, tensor in tensors.items()}
    step_on_npu = torch.tensor([step]).npu()
    ops.apply_fused_ema_adam_(**on_npu, step=step_on_npu, **{**test_ema_adam.OPTIONS, **options})
    return on_npu


@contextmanager
def checked_values() -> Iterator[None]:
    """Let the package read values of tensors on a device inside the block."""
    torch_aclnn_ops.check_values(True)
    try:
        yield
    finally:
        torch_aclnn_ops.check_values(False)


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Yield a counter that holds, after the block, the package's launches of each CANN operator inside it."""
    before, found = torch_aclnn_ops.launches(), Counter()
    yield found
    found.update(torch_aclnn_ops.launches())
    found.subtract(before)


def meaning_of(status: int) -> str:
    """Return the message of a phase-one failure with a status."""
    one = torch.rand(2).npu()
    host_npu.fail("aclnnMseLossBackwardGetWorkspaceSize", status=status, message="asked for by a test")
    with pytest.raises(RuntimeError) as caught:
        ops.mse_loss_backward(one, one, one, 0)
    found = re.search(rf"GetWorkspaceSize returned {status}, (.+?)\)\.\n", str(caught.value))
    assert found is not None, caught.value
    return found[1]


def good_call(contract: type[RawOperatorContract]) -> None:
    """Call the operator with valid arguments, and read the result."""
    arguments = to_npu(good_arguments(contract))
    for output in flat(contract.OPERATOR.overload(*arguments)):
        output.cpu()


def linear_case(dtype):
    make = Maker(dtype)
    target = make.index(160, 24)
    target[3] = -100
    return make.normal(24, 16), make.normal(160, 16) * 0.2, target


# Options that the fused operators do not support, by the reason that explain() gives.
CHUNKED = {
    "of linear_bias": {"linear_bias": torch.zeros(160, dtype=torch.bfloat16)},
    "of softcap": {"softcap": 30.0},
    "of temperature": {"temperature": 0.7},
    "of chunk_size": {"chunk_size": 8},
    "of max_memory": {"max_memory": 2**20},
    "of label_smoothing": {"label_smoothing": 0.1},
    "entropy is requested": {"outputs": ("entropy",)},
    "predicted tokens are requested": {"outputs": ("token_accuracy",)},
}
