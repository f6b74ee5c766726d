"""Many calls with changing shapes leave no live objects and do not grow the process."""

import gc
import itertools

from torch_aclnn_ops import ops

import host_npu
import pytest
import torch

from benchmarks._harness import status_bytes
from tests import test_ema_adam
from tests._contract import Maker
from tests.npu._operators import CONTRACTS, to_npu


def _calls_of(contract):
    """Return the arguments of the samples that CANN supports."""
    dtype = contract.CANN_DTYPES[0]
    arguments = [sample.arguments(Maker(dtype)) for sample in contract.SAMPLES]
    return contract.OPERATOR.overload, [to_npu(one) for one in arguments if contract.fits_cann(*one)], {}


def _adam_calls():
    shapes = itertools.product(range(1, 6), range(1, 5))
    calls = [(*(torch.rand(shape).npu() for _ in range(5)), torch.tensor([7]).npu()) for shape in shapes]
    return ops.apply_fused_ema_adam_.overload, calls, test_ema_adam.OPTIONS


@pytest.mark.simulator
@pytest.mark.parametrize("contract", [*CONTRACTS, None], ids=lambda one: one.OPERATOR.name if one else "adam")
@pytest.mark.parametrize(
    ("number", "bytes_per_call"), [(10_000, 400), pytest.param(100_000, 80, marks=pytest.mark.exhaustive)]
)
def test_many_calls_leak_nothing(contract, number, bytes_per_call):
    operator, calls, options = _adam_calls() if contract is None else _calls_of(contract)

    def run(times):
        for i in range(times):
            operator(*calls[i % len(calls)], **options)
            if i % 1000 == 999:
                torch.npu.synchronize()
        torch.npu.synchronize()
        gc.collect()

    run(5_000)  # fills the caches of shapes, the queue and the allocators
    alive, device_bytes, resident = host_npu.stats().alive, host_npu.stats().device_bytes, status_bytes("VmRSS")
    run(number)
    assert host_npu.stats().alive == alive
    assert host_npu.stats().device_bytes == device_bytes
    assert status_bytes("VmRSS") - resident < number * bytes_per_call
