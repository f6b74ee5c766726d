"""A step of FusedEmaAdam against AdamW with the EMA of swa_utils: ``python -m benchmarks.ema_adam``.

``--npu`` counts the launches of a step on an NPU, or on the host NPU, and compares its host time with that of the
operator's own entry point.
"""

from argparse import Namespace

from torch_aclnn_ops import _extension
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks._harness import LIMIT, Call, compare, copy_of, doublings, parser, run, use_npu
from benchmarks._launches import compare_on_npu
from benchmarks._results import Row

_EMA_DECAY = 0.9999
_MOST_TENSORS, _SMALL = 2048, 4096
_MODELS = ((200, 50_000), (2_000, 256), (20, 1_000_000))
_ON_NPU = (300, 64)


class _Model(nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(count))
        for weight in self.weights:
            weight.grad = torch.randn(size)


def _make_cases(count: int, size: int) -> dict[str, Call]:
    peer, plain, flat, fresh = (_Model(count, size) for _ in range(4))
    adamw = torch.optim.AdamW(peer.parameters(), fused=True)
    averaged = AveragedModel(peer, multi_avg_fn=get_ema_multi_avg_fn(_EMA_DECAY))
    averaged.update_parameters(peer)
    grads = [weight.grad for weight in fresh.parameters()]
    fresh_step = FusedEmaAdam(fresh.parameters(), ema_decay=_EMA_DECAY, flatten=True).step

    def their_step() -> None:
        adamw.step()
        averaged.update_parameters(peer)

    def step_of_new_gradients() -> None:  # as after ``zero_grad()``
        for weight, grad in zip(fresh.parameters(), grads, strict=True):
            weight.grad = grad
        fresh_step()

    return {
        "AdamW(fused=True), swa_utils EMA": their_step,
        "FusedEmaAdam": FusedEmaAdam(plain.parameters(), ema_decay=_EMA_DECAY).step,
        "FusedEmaAdam(flatten=True)": FusedEmaAdam(flat.parameters(), ema_decay=_EMA_DECAY, flatten=True).step,
        "FusedEmaAdam(flatten=True), new gradients": step_of_new_gradients,
        # A step reads five tensors and writes all of them but the gradient. It may be faster than a copy of as many
        # bytes: it writes to memory it has just read, while a copy has to fetch the memory that it overwrites.
        f"{LIMIT}copy of as many bytes": copy_of(9 * 4 * count * size),
    }


def _measure_on_npu(options: Namespace) -> list[Row]:
    """Compare with calls of the operator's entry point; the time is the host's, without waiting for the device."""
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
    """Compare for float32 parameters: those of some models, and increasing numbers of tensors."""
    sizes = [
        (count, size, {"configuration": f"{count:,} tensors of {size:,} elements"})
        for count, size in (() if options.quick else _MODELS)
    ]
    columns = {"configuration": f"of {_SMALL} elements each", "variable": "tensors"}
    sizes += [(count, _SMALL, {**columns, "size": count}) for count in doublings(_MOST_TENSORS, options.quick)]
    rows = []
    for count, size, columns in sizes:
        rows += compare(_make_cases(count, size), options.rounds, least_bytes=0, operator="ema_adam", **columns)
    return rows


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--npu", action="store_true", help="a step on an NPU, or on the host NPU")
    options = made.parse_args()
    run("ema_adam_npu" if options.npu else "ema_adam", _measure_on_npu if options.npu else measure, options, rounds=50)
