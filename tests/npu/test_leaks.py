"""Many calls with changing shapes leave nothing alive and do not grow the process."""

import gc

from torch_aclnn_ops import ops

import host_npu
import pytest
import torch

from benchmarks._harness import status_bytes
from tests import test_ema_adam

SHAPES = [(rows, features) for rows in range(1, 6) for features in range(1, 5)]


def _random(*shape, dtype=torch.float32):
    return torch.rand(shape).to(dtype).npu()


def _mse(rows, features):
    return ops.mse_loss_backward, (_random(), _random(rows, features), _random(rows, features), rows % 3)


def _bce(rows, features):
    tensors = _random(), _random(rows, features), _random(rows, features)
    return ops.binary_cross_entropy_backward, (*tensors, _random(features), rows % 3)


def _embedding(rows, features):
    indices = torch.randint(4, (rows,)).npu()
    return ops.embedding_dense_backward, (_random(rows, features), indices, 4, -1, features % 2 == 0)


def _linear(rows, features):
    half = torch.float16
    return _random(rows, features, dtype=half), _random(6, features, dtype=half), torch.randint(6, (rows,)).npu()


def _max_sum(rows, features):
    return ops.fused_linear_online_max_sum, (*_linear(rows, features), 0, 6, features % 2 == 0)


def _loss(rows, features):
    logits = _random(rows, 6) if features % 2 else None
    return ops.fused_cross_entropy_loss_with_max_sum, (_random(rows), _random(rows) + 1, _random(rows), logits)


def _grad(rows, features):
    input, weight, target = _linear(rows, features)
    mask = torch.zeros(1, dtype=torch.uint8).npu()
    statistics = _random(rows), _random(rows) + 1
    return ops.fused_linear_cross_entropy_loss_grad, (_random(rows), input, weight, mask, target, *statistics, None)


def _adam(rows, features):
    state = [_random(rows, features) for _ in range(5)]
    return ops.apply_fused_ema_adam_, (*state, torch.tensor([rows]).npu())


@pytest.mark.simulator
@pytest.mark.parametrize(
    "make", [_mse, _bce, _embedding, _max_sum, _loss, _grad, _adam], ids=lambda make: make.__name__
)
@pytest.mark.parametrize(
    ("number", "bytes_per_call"), [(10_000, 400), pytest.param(100_000, 80, marks=pytest.mark.exhaustive)]
)
def test_many_calls_leak_nothing(make, number, bytes_per_call):
    calls = [make(*shape) for shape in SHAPES]
    operator = calls[0][0].overload
    options = test_ema_adam.OPTIONS if make is _adam else {}

    def run(times):
        for i in range(times):
            operator(*calls[i % len(calls)][1], **options)
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
