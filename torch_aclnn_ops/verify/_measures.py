"""Time and memory of forward and backward passes, compared with torch's functions on the same device."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

from torch_aclnn_ops.verify._operators import Call, calls, dtypes_of, head, linear_cross_entropy, normal

import torch
from torch import Tensor

_ROUNDS = 7
_MIB = 2**20


def measures(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each measurement and a function that returns its result or raises."""
    for name, call in calls().items():
        yield f"{name}, small, torch.float32", partial(_measure, call, device, torch.float32)
    rows, features, classes = 2048, 128, 16384
    large = Call(
        calls()["linear_cross_entropy"].function,
        linear_cross_entropy,
        lambda: [normal(rows, features), head(features, classes)],
        lambda: [torch.randint(classes, (rows,))],
    )
    dtype = dtypes_of(device)[-1] if device == "npu" else torch.float32  # 16 bits take minutes on some CPUs
    yield f"linear_cross_entropy, {rows} x {features} x {classes}, {dtype}", partial(_measure, large, device, dtype)


def _measure(call: Call, device: str, dtype: torch.dtype) -> str:
    """Return the median times of interleaved calls, and their peak memory in addition to the arguments."""
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in call.inputs()]
    constants = [
        tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device) for tensor in call.constants()
    ]
    functions = (call.function, call.reference)
    seconds: tuple[list[float], list[float]] = ([], [])
    memory = [0, 0]
    for _ in range(_ROUNDS):
        for number, function in enumerate(functions):
            took, held = _once(partial(function, *inputs, *constants), inputs, device)
            seconds[number].append(took)
            memory[number] = max(memory[number], held)
    ours, theirs = (1e3 * statistics.median(each[1:]) for each in seconds)  # the first call may compile
    text = f"{ours:.3f} ms, torch {theirs:.3f} ms"
    if device == "npu":
        text += f"; {memory[0] / _MIB:.1f} MiB, torch {memory[1] / _MIB:.1f} MiB"
    return text


def _once(call: Callable[[], Tensor], inputs: list[Tensor], device: str) -> tuple[float, int]:
    npu = torch.npu if device == "npu" else None  # type: ignore[attr-defined]
    before = 0
    if npu is not None:
        npu.synchronize()
        npu.reset_peak_memory_stats()
        before = npu.memory_allocated()
    began = time.perf_counter()
    result = call()
    torch.autograd.grad(result, inputs, torch.ones_like(result))
    if npu is not None:
        npu.synchronize()
    took = time.perf_counter() - began
    return took, 0 if npu is None else npu.max_memory_allocated() - before
