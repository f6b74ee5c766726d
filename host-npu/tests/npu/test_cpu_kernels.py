"""PyTorch operators that CPU kernels compute for the NPU: results and gradients equal the CPU's."""

import math
from collections.abc import Callable

import pytest
import torch
from tests._process import on_npu


def test_random_numbers_follow_the_npus_own_generator():
    torch.manual_seed(3)
    host = torch.randn(4)
    torch.manual_seed(3)
    first = torch.randn(4, device="npu")
    state = torch.npu.get_rng_state()
    second = torch.randn(4, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(4), host)
    assert torch.equal(torch.randn(4, device="npu"), second) and not torch.equal(first, second)
    assert set(torch.nn.functional.dropout(torch.ones(64, device="npu")).tolist()) == {0, 2}


def test_a_generator_can_be_given_and_has_to_be_the_npus():
    first, second = (
        torch.randperm(20, device="npu", generator=torch.Generator("npu").manual_seed(5)) for _ in range(2)
    )
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.randn(2, device="npu", generator=torch.Generator())


def test_a_result_can_go_to_a_tensor_that_has_to_grow():
    left = torch.arange(6.0, device="npu").reshape(2, 3)
    for out in (torch.empty(0, device="npu"), torch.full((1,), 9.0, device="npu")):
        assert torch.mm(left, left.t(), out=out) is out
        assert out.tolist() == [[5, 14], [14, 50]]


def test_autocast_chooses_the_dtype():
    with torch.autocast("npu", torch.bfloat16):
        assert (torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu")).dtype == torch.bfloat16


def _numbers(device: str, *shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).reshape(shape).to(device).requires_grad_()


def _with_gradient(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> list[torch.Tensor]:
    result = function(tensor)
    return [result, *torch.autograd.grad(result.abs().square().sum(), tensor)]


def _optimized(device: str, **options: bool) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, size, device=device)) for size in (3, 5)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = parameter.detach().square()
    optimizer.step()
    return parameters


def _convolved(device: str) -> list[torch.Tensor]:
    image, weight = (torch.linspace(-1, 1, n, device=device, requires_grad=True) for n in (50, 18))
    torch.nn.functional.conv2d(image.view(1, 2, 5, 5), weight.view(1, 2, 3, 3)).square().sum().backward()
    return [image.grad, weight.grad]


def _zero_tensors(device: str) -> list[torch.Tensor]:
    x = _numbers(device, 3)
    _, tangent = torch.func.jvp(lambda a: (a - x) ** 2, (x,), (x + 1,))
    zeros = torch._efficientzerotensor(2, device=device)
    return [tangent, zeros + 1, torch._efficientzerotensor(2).to(device) + 1]


def _derivatives(device: str) -> list[torch.Tensor]:
    halves = torch.full((4, 3), 0.5, device=device)
    functions = [
        lambda x: torch.nn.functional.binary_cross_entropy_with_logits(x, halves, pos_weight=halves[0]),
        lambda x: torch.gather(x, 0, torch.ones(2, 2, dtype=torch.int64, device=device)),
        lambda x: torch.nn.functional.dropout(x, 1.0),
    ]
    if torch.__version__ >= (2, 10):  # torch_npu 2.9 leaves it to PyTorch, which computes it in float64
        functions.append(lambda x: torch.renorm(x, 2, 0, 0.5))
    return [tensor for function in functions for tensor in _with_gradient(function, _numbers(device, 4, 3))]


def _recurrent(device: str) -> list[torch.Tensor]:
    torch.manual_seed(2)
    results = []
    for make in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        module = make(3, 4, 2).to(device)
        results += _with_gradient(lambda x, module=module: module(x)[0], _numbers(device, 5, 2, 3))
        results += [
            torch.autograd.grad(module(_numbers(device, 5, 2, 3))[0].sum(), parameter)[0]
            for parameter in module.parameters()
        ]
        packed = torch.nn.utils.rnn.pack_padded_sequence(_numbers(device, 5, 2, 3), torch.tensor([5, 3]))
        results.append(torch.nn.utils.rnn.pad_packed_sequence(module(packed)[0])[0])
    for make in (torch.nn.LSTMCell, torch.nn.GRUCell):
        results += make(3, 4, bias=False).to(device)(_numbers(device, 2, 3))
    return results


def _conjugated(device: str) -> list[torch.Tensor]:
    x = _numbers(device, 4, 4)
    y = torch.complex(x, x.T.square())
    results = [y.conj().resolve_conj(), y.mH @ y, y.conj().clone(), y.conj().imag.clone(), y.conj().cpu()]
    results += [torch.zeros_like(y).copy_(y.conj()), y.conj() + y, y.detach().cpu().conj().to(device)]
    for transform in (torch.fft.fft, torch.fft.ifft, torch.fft.hfft, torch.fft.ihfft, torch.fft.rfft, torch.fft.ifft2):
        results += _with_gradient(transform, _numbers(device, 4, 4))
    return results


def _both(function: Callable[[str], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[tensor.detach().cpu() for tensor in function(device)] for device in ("npu", "cpu")]


@pytest.mark.parametrize(
    "function",
    [lambda device: _optimized(device, foreach=True), lambda device: _optimized(device, fused=True), _convolved],
    ids=["foreach optimizer", "fused optimizer", "convolution"],
)
def test_results_and_gradients_are_the_cpus(function):
    found, expected = _both(function)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "function",
    [_derivatives, _recurrent, _zero_tensors],
    ids=["kernels that torch_npu derives", "recurrent networks", "tensors of zeros without memory"],
)
def test_results_and_gradients_are_close_to_the_cpus(function):
    torch.testing.assert_close(*_both(function), rtol=1e-5, atol=1e-6)


def test_conjugates_and_transforms_are_close_to_the_cpus():
    # Multiplies complex matrices, which a device refuses.
    torch.testing.assert_close(*on_npu(_both, _conjugated, HOST_NPU_DTYPES="torch"), rtol=1e-5, atol=1e-6)
