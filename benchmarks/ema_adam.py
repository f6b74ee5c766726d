"""A step of FusedEmaAdam against AdamW with the EMA of swa_utils and of timm: ``python -m benchmarks.ema_adam``.

``--npu`` counts the launches of a step on an NPU, or on the host NPU, and compares its host time with that of the
operator's own entry.
"""

import importlib.util
import runpy
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from torch_aclnn_ops import _extension
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks._harness import LIMIT, Call, absent, compare, copy_of, doublings, is_installed, parser, run, use_npu
from benchmarks._launches import compare_on_npu
from benchmarks._results import Row

_PEER = "AdamW(fused=True), swa_utils EMA"
_TIMM = "AdamW(fused=True), timm ModelEmaV3"
_EMA_DECAY = 0.9999
_MOST_TENSORS, _SMALL = 2048, 4096
_LARGEST, _FEW = 2**20, 20
_MODEL = (200, 50_000)
_ON_NPU = (300, 64)


class _Model(nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(count))
        for weight in self.weights:
            weight.grad = torch.randn(size)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
    return optimizer.step


def _step_with_swa_utils(model: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_EMA_DECAY))
    averaged.update_parameters(model)

    def step() -> None:
        optimizer.step()
        averaged.update_parameters(model)

    return step


def _step_with_timm(model: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
    # The package itself would import torchvision, which the file does not need.
    package = importlib.util.find_spec("timm")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "utils" / "model_ema.py"
    averaged = runpy.run_path(str(source))["ModelEmaV3"](model, decay=_EMA_DECAY)

    def step() -> None:
        optimizer.step()
        averaged.update(model)

    return step


def _step_of_new_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
    """Make a step as after ``zero_grad()``: every gradient is a new tensor."""
    grads = [weight.grad for weight in model.parameters()]

    def step() -> None:
        for weight, grad in zip(model.parameters(), grads, strict=True):
            weight.grad = grad
        optimizer.step()

    return step


def _make_cases(count: int, size: int) -> dict[str, Call]:
    def adamw(step: Callable[[nn.Module, torch.optim.Optimizer], Call], **options: bool) -> Call:
        model = _Model(count, size)
        return step(model, torch.optim.AdamW(model.parameters(), **options))

    def ours(step: Callable[[nn.Module, torch.optim.Optimizer], Call] = _step, **options: bool) -> Call:
        model = _Model(count, size)
        return step(model, FusedEmaAdam(model.parameters(), ema_decay=_EMA_DECAY, **options))

    cases = {
        _PEER: adamw(_step_with_swa_utils, fused=True),
        "AdamW(foreach=True), swa_utils EMA": adamw(_step_with_swa_utils, foreach=True),
        "AdamW(foreach=False), swa_utils EMA": adamw(_step_with_swa_utils, foreach=False),
        "FusedEmaAdam": ours(),
        "FusedEmaAdam(flatten=True)": ours(flatten=True),
        "FusedEmaAdam(flatten=True), new gradients": ours(_step_of_new_gradients, flatten=True),
    }
    if is_installed("timm"):
        cases[_TIMM] = adamw(_step_with_timm, fused=True)
    # A step reads five tensors, and writes all of them but the gradient. It may go below a copy of as many bytes: it
    # writes where it has just read, and a copy has to fetch what it writes over.
    cases[f"{LIMIT}copy of as many bytes"] = copy_of(9 * 4 * count * size)
    return cases


def _measure_on_npu(options: Namespace) -> list[Row]:
    """Compare with calls of the operator's entry; the time is the host's, without the wait for the device."""
    use_npu()
    count, size = _ON_NPU

    def step(dtype: torch.dtype, **options: bool) -> Call:
        model = _Model(count, size).to("npu", dtype)
        return FusedEmaAdam(model.parameters(), ema_decay=_EMA_DECAY, **options).step

    entry = _extension.entries["apply_fused_ema_adam_"]
    tensors = [[torch.ones(size).npu() for _ in range(5)] + [torch.tensor(1).npu()] for _ in range(count)]
    numbers = 1e-3, _EMA_DECAY, 0.9, 0.999, 1e-8, 1, True, 0.01
    cases: dict[str, Call] = {
        "the operator's entry": lambda: [entry(*each, *numbers) for each in tensors],
        "FusedEmaAdam": step(torch.float32),
        "FusedEmaAdam, bfloat16": step(torch.bfloat16),
        "FusedEmaAdam(flatten=True)": step(torch.float32, flatten=True),
        "FusedEmaAdam(flatten=True), bfloat16": step(torch.bfloat16, flatten=True),
    }
    configuration = f"{count} tensors of {size} elements"
    return compare_on_npu(cases, options.rounds, operator="ema_adam", configuration=configuration, dtype="float32")


def measure(options: Namespace) -> list[Row]:
    """Compare for float32 parameters: more and more tensors, and larger and larger ones."""
    counts = [] if options.quick else [(*_MODEL, {"configuration": f"{_MODEL[0]} tensors of {_MODEL[1]:,} elements"})]
    columns = {"configuration": f"of {_SMALL} elements each", "variable": "tensors"}
    counts += [(count, _SMALL, {**columns, "size": count}) for count in doublings(_MOST_TENSORS, options.quick)]
    columns = {"configuration": f"each, {_FEW} tensors", "variable": "elements"}
    counts += [(_FEW, size, {**columns, "size": size}) for size in doublings(_LARGEST, options.quick)]
    rows = []
    for count, size, columns in counts:
        rows += compare(_make_cases(count, size), options.rounds, least_bytes=0, operator="ema_adam", **columns)
    same = {"operator": "ema_adam", "device": "cpu", "dtype": "float32"}
    if not is_installed("timm"):
        rows.append(absent(_TIMM, "timm is not installed", **same))
    rows.append(absent("apex FusedAdam", "its kernels need CUDA", **same))
    return rows


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--npu", action="store_true", help="a step on an NPU, or on the host NPU")
    options = made.parse_args()
    run("ema_adam_npu" if options.npu else "ema_adam", _measure_on_npu if options.npu else measure, options, rounds=50)
