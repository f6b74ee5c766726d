"""Find out what operators compute that CPU kernels stand in for; facts.py prints it."""

import math
from collections.abc import Callable

import torch
from _facts import error_of, fact


@fact
def random_numbers():
    torch.manual_seed(3)
    host = torch.randn(4)
    torch.manual_seed(3)
    first = torch.randn(4, device="npu")
    state = torch.npu.get_rng_state()
    second = torch.randn(4, device="npu")
    torch.npu.set_rng_state(state)
    again = torch.randn(4, device="npu")
    return {
        "the host's are untouched": torch.equal(torch.randn(4), host),
        "they differ": not torch.equal(first, second),
        "a state repeats them": torch.equal(second, again),
        "dropout": sorted(set(torch.nn.functional.dropout(torch.ones(64, device="npu")).tolist())),
    }


@fact
def generator():
    def draw():
        return torch.randperm(20, device="npu", generator=torch.Generator("npu").manual_seed(5)).tolist()

    return draw() == draw()


@fact
def generator_of_the_host():
    return error_of(lambda: torch.randn(2, device="npu", generator=torch.Generator()))


@fact
def results_in_given_tensors():
    left = torch.arange(6.0, device="npu").reshape(2, 3)
    empty, full = torch.empty(0, device="npu"), torch.full((1,), 9.0, device="npu")
    results = [torch.mm(left, left.t(), out=out) for out in (empty, full)]
    return results[0] is empty, empty.tolist(), full.tolist()


@fact
def autocast():
    with torch.autocast("npu", torch.bfloat16):
        return str((torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu")).dtype)


def optimized(device: str, **options: bool) -> list[float]:
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, size, device=device)) for size in (3, 5)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = parameter.detach().square()
    optimizer.step()
    return torch.cat(parameters).tolist()


@fact
def foreach_optimizer():
    return optimized("npu", foreach=True) == optimized("cpu", foreach=True)


@fact
def fused_optimizer():
    return optimized("npu", fused=True) == optimized("cpu", fused=True)


def convolved(device: str) -> list[float]:
    image, weight = (torch.linspace(-1, 1, n, device=device, requires_grad=True) for n in (50, 18))
    torch.nn.functional.conv2d(image.view(1, 2, 5, 5), weight.view(1, 2, 3, 3)).square().sum().backward()
    return [*image.grad.tolist(), *weight.grad.tolist()]


@fact
def convolution():
    return convolved("npu") == convolved("cpu")


def on_both(function: Callable[[str], list[torch.Tensor]]) -> bool:
    """Whether a function's tensors are those of the CPU, but for rounding in another order."""
    found = [[tensor.detach().cpu() for tensor in function(device)] for device in ("npu", "cpu")]
    return all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(*found, strict=True))


def numbers(device: str, *shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).reshape(shape).to(device).requires_grad_()


def with_gradient(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> list[torch.Tensor]:
    result = function(tensor)
    return [result, *torch.autograd.grad(result.abs().square().sum(), tensor)]


def attended(device: str) -> list[torch.Tensor]:
    inputs = [torch.linspace(-1, shift, 96, device=device).view(1, 2, 6, 8).requires_grad_() for shift in (1, 2, 3)]
    result = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    result.square().sum().backward()
    return [result, *(tensor.grad for tensor in inputs)]


@fact
def attention():
    return on_both(attended)


@fact
def zero_tensors():
    def derivative(device):
        x = numbers(device, 3)
        _, tangent = torch.func.jvp(lambda a: (a - x) ** 2, (x,), (x + 1,))
        return [tangent, torch._efficientzerotensor(2, device=device) + 1]

    return on_both(derivative), (torch._efficientzerotensor(2).to("npu") + 1).tolist()


def derivatives(device: str) -> list[torch.Tensor]:
    halves = torch.full((4, 3), 0.5, device=device)
    functions = [
        lambda x: torch.nn.functional.binary_cross_entropy_with_logits(x, halves, pos_weight=halves[0]),
        lambda x: torch.renorm(x, 2, 0, 0.5),
        lambda x: torch.gather(x, 0, torch.ones(2, 2, dtype=torch.int64, device=device)),
        lambda x: torch.nn.functional.dropout(x, 1.0),
    ]
    return [tensor for function in functions for tensor in with_gradient(function, numbers(device, 4, 3))]


@fact
def kernels_that_torch_npu_derives():
    return on_both(derivatives)


def recurrent(device: str) -> list[torch.Tensor]:
    torch.manual_seed(2)
    results = []
    for make in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        module = make(3, 4, 2).to(device)
        results += with_gradient(lambda x, module=module: module(x)[0], numbers(device, 5, 2, 3))
        results += [
            torch.autograd.grad(module(numbers(device, 5, 2, 3))[0].sum(), parameter)[0]
            for parameter in module.parameters()
        ]
        packed = torch.nn.utils.rnn.pack_padded_sequence(numbers(device, 5, 2, 3), torch.tensor([5, 3]))
        results.append(torch.nn.utils.rnn.pad_packed_sequence(module(packed)[0])[0])
    for make in (torch.nn.LSTMCell, torch.nn.GRUCell):
        results += make(3, 4, bias=False).to(device)(numbers(device, 2, 3))
    return results


@fact
def recurrent_networks():
    return on_both(recurrent)


def conjugated(device: str) -> list[torch.Tensor]:
    x = numbers(device, 4, 4)
    y = torch.complex(x, x.T.square())
    results = [y.conj().resolve_conj(), y.mH @ y, y.conj().clone(), y.conj().imag.clone(), y.conj().cpu()]
    results += [torch.zeros_like(y).copy_(y.conj()), y.conj() + y, y.detach().cpu().conj().to(device)]
    for transform in (torch.fft.fft, torch.fft.ifft, torch.fft.hfft, torch.fft.ihfft, torch.fft.rfft, torch.fft.ifft2):
        results += with_gradient(transform, numbers(device, 4, 4))
    return results


@fact
def conjugates_and_transforms():
    return on_both(conjugated)
