"""Does a model fit on Ascend 910B devices? An estimate of the memory and time of its training.

``python -m torch_aclnn_ops.plan --model llama-3-70b --devices 64`` prints whether the model fits, with and without
this package, and bytes and seconds per device. Devices of a tensor-parallel group share rows and split the vocabulary
and the layers' matrices; different groups have different rows. Weights, gradients and states are sharded over all
devices in float32 (FSDP2), and all-gathered in ``dtype``. docs/scale.md explains the terms and assumptions. Times are
lower bounds of head and optimizer at peak compute and memory throughput, without overlap and collectives.

Source:
    Ascend 910B2: 24 cube cores of 16 x 16 x 16 multiplications at 1.8 GHz are 353.9 TFLOP/s in 16 bits (CANN's
    ``platform_config/Ascend910B2C.ini``, https://gitcode.com/cann/runtime); 64 GB and 1.6 TB/s
    (``docs/zh/develop/cross_platform_migration_guide.md``, https://gitcode.com/cann/ops-nn).
    Workspaces: the tiling of aclnnFusedLinearCrossEntropyLossGrad, which the host NPU allocates too.
    Shapes: ``config.json`` on https://huggingface.co of meta-llama/Meta-Llama-3-8B, meta-llama/Meta-Llama-3-70B,
    Qwen/Qwen2.5-72B and deepseek-ai/DeepSeek-V3, this one without its multi-token prediction and its layers.
"""

import argparse
import dataclasses
import math
import signal
import sys
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

from torch_aclnn_ops._plan_checks import SHAPE, check_counts, check_model
from torch_aclnn_ops._plan_costs import MODELS, Costs, Layers, Model, Run, collectives, costs
from torch_aclnn_ops._version import __version__

__all__ = ["MODELS", "Costs", "Layers", "Model", "Plan", "main", "plan"]


def __dir__() -> list[str]:
    return __all__


_DTYPES = ("bfloat16", "float16")
_GIB = 2**30
_LAYERS = ("layers", "heads", "kv-heads", "intermediate")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The estimate for a model on a number of devices.

    Attributes:
        model: The shape of the model.
        devices: Number of devices.
        tensor_parallel: Number of devices that share rows and split the vocabulary and the layers' matrices.
        rows: Tokens per step of a tensor-parallel group.
        checkpointing: Whether each layer is recomputed in the backward pass from its input.
        dtype: Dtype of matrix products and activations.
        memory: Memory of a device in bytes.
        ours: Costs with this package.
        others: Costs with ``cross_entropy(linear(...).float(), ...)``, ``torch.optim.AdamW`` and an EMA by ``lerp``.
        collectives: Bytes that a device sends in a step, by purpose.
    """

    model: Model
    devices: int
    tensor_parallel: int
    rows: int
    checkpointing: bool
    dtype: str
    memory: int
    ours: Costs
    others: Costs
    collectives: dict[str, int]

    def left(self, costs: Costs) -> int:
        """Return the bytes per device that remain for what is not included; negative if the model does not fit."""
        return self.memory - costs.peak

    def fits(self, costs: Costs) -> bool | None:
        """Return whether the model fits; ``None`` if that depends on its layers, whose shape is not given."""
        if self.left(costs) < 0:
            return False
        return None if self.model.layers is None else True

    def fewest_devices(self) -> int | None:
        """Return the smallest number of devices on which the model fits with this package, or ``None``.

        Numbers are multiples of the tensor parallel size.
        """

        def fits(devices: int) -> bool:
            run = Run(devices, self.tensor_parallel, self.rows, self.checkpointing)
            return self.left(costs(self.model, run)[0]) >= 0

        numbers = range(self.tensor_parallel, self.tensor_parallel * 2**20 + 1, self.tensor_parallel)
        place = bisect_left(numbers, True, key=fits)  # more devices never need more memory each
        return numbers[place] if place < len(numbers) else None

    def __str__(self) -> str:
        """Format the answers and the estimate as a table."""
        both, memory = (self.others, self.ours), self.memory / _GIB
        lines = [
            *self._described(),
            f"without this package: {self._answer('others')}",
            f"with this package:    {self._answer('ours')}",
            f"minimum with it:      {self._minimum()}",
            f"{'':<58}{'without':>10}{'with':>10}",
        ]
        values = [
            ("weights, gradients, moments and EMA weights, GiB", "states", _GIB),
            ("activations that the layers save, GiB", "activations", _GIB),
            ("backward pass of a layer, GiB", "layer_backward", _GIB),
            ("all-gathered weight of the head, GiB", "head_weight", _GIB),
            ("backward pass of the head, GiB", "head_backward", _GIB),
            ("buffers of the optimizer step, GiB", "step_buffers", _GIB),
            (f"peak of {memory:g} GiB", "peak", _GIB),
            ("head, forward and backward, at least, ms", "head_seconds", 1e-3),
            ("optimizer step with EMA, at least, ms", "optimizer_seconds", 1e-3),
        ]
        pairs = [(what, *(getattr(costs, name) / unit for costs in both)) for what, name, unit in values]
        lines += [f"{what:<58}{without:>10.2f}{ours:>10.2f}" for what, without, ours in pairs]
        lines += [f"{f'{what}, GiB sent':<68}{count / _GIB:>10.3f}" for what, count in self.collectives.items()]
        return "\n".join(lines)

    def _described(self) -> list[str]:
        model, layers = self.model, self.model.layers
        saved = "with activation checkpointing" if self.checkpointing else "without activation checkpointing"
        shape = (
            "layers: unknown, so not included"
            if layers is None
            else f"{layers.number} layers of {layers.heads} heads, {layers.kv_heads} key-value heads, intermediate size"
            f" {layers.intermediate}; {saved}"
        )
        return [
            f"{model.parameters:,} parameters, head {model.vocab} x {model.hidden}; {self.rows} rows in {self.dtype}",
            shape,
            f"{self.devices} devices, tensor parallel size {self.tensor_parallel}",
        ]

    def _minimum(self) -> str:
        fewest = self.fewest_devices()
        if fewest is None:
            return "no number of devices fits"
        return f"{'at least ' if self.model.layers is None else ''}{fewest} devices"

    def _answer(self, which: Literal["ours", "others"]) -> str:
        left, memory = self.left(getattr(self, which)) / _GIB, f"{self.memory / _GIB:g} GiB"
        if left < 0:
            return f"does not fit, {-left:.2f} GiB more than {memory}{self._checkpointed(which)}"
        if self.model.layers is None:
            return f"unknown, {left:.2f} of {memory} remain for the layers, whose shape is not given"
        return f"fits, {left:.2f} of {memory} remain"

    def _checkpointed(self, which: Literal["ours", "others"]) -> str:
        """Return whether a model that does not fit without activation checkpointing fits with it."""
        if self.checkpointing or self.model.layers is None:
            return ""
        ours, others = costs(self.model, Run(self.devices, self.tensor_parallel, self.rows, True))
        fits = self.left(ours if which == "ours" else others) >= 0
        return f"; with activation checkpointing it {'fits' if fits else 'does not fit either'}"


def plan(
    model: str | Model,
    devices: int,
    *,
    tensor_parallel: int = 1,
    sequence: int = 8192,
    micro_batch: int = 1,
    checkpointing: bool = True,
    dtype: str = "bfloat16",
    memory: float = 64,
) -> Plan:
    """Estimate whether a model fits on a number of devices, and the time of head and optimizer.

    Args:
        model: A name in :data:`MODELS`, or a shape.
        devices: Number of devices.
        tensor_parallel: Number of devices that share rows and split the vocabulary and the layers' matrices; must
            divide ``devices``.
        sequence: Sequence length in tokens.
        micro_batch: Number of sequences per step of a tensor-parallel group.
        checkpointing: Whether each layer is recomputed in the backward pass from its input.
        dtype: ``"bfloat16"`` or ``"float16"``, the dtype of matrix products and activations.
        memory: Memory of a device in GiB.

    Returns:
        The estimate.

    Raises:
        TypeError: A number has the wrong type.
        ValueError: A name is unknown, or a number is out of range.

    Example:
        >>> found = plan("llama-3-70b", 16)
        >>> round(found.others.head_backward / 2**30, 1), round(found.ours.head_backward / 2**30, 1)
        (11.7, 6.8)
        >>> found.fits(found.ours)  # the states alone take more than 64 GiB
        False
    """
    if isinstance(model, str):
        if model not in MODELS:
            raise ValueError(f"plan: model must be a Model or one of {', '.join(MODELS)}, but it is {model!r}")
        model = MODELS[model]
    check_counts(
        {"devices": devices, "tensor_parallel": tensor_parallel, "sequence": sequence, "micro_batch": micro_batch}
    )
    check_model(model)
    if devices % tensor_parallel or tensor_parallel > model.vocab:
        raise ValueError(
            f"plan: tensor_parallel must divide devices = {devices}, and be at most vocab = {model.vocab}, but it is"
            f" {tensor_parallel}"
        )
    if not isinstance(checkpointing, bool):
        raise TypeError(f"plan: checkpointing must be a bool, but it is {checkpointing!r}")
    if dtype not in _DTYPES:
        raise ValueError(f"plan: dtype must be one of {', '.join(_DTYPES)}, but it is {dtype!r}")
    if not 0 < memory < math.inf:
        raise ValueError(f"plan: memory must be a finite number of GiB above 0, but it is {memory}")
    run = Run(devices, tensor_parallel, sequence * micro_batch, checkpointing)
    ours, others = costs(model, run)
    sent = collectives(model, run)
    return Plan(
        model,
        **dataclasses.asdict(run),
        dtype=dtype,
        memory=int(memory * _GIB),
        ours=ours,
        others=others,
        collectives=sent,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print an estimate.

    Args:
        arguments: Command-line arguments; ``sys.argv`` if ``None``.

    Returns:
        The exit status: 0, also if the model does not fit, or 2 for invalid arguments.

    Example:
        >>> main(["--model", "llama-3-8b", "--devices", "8"])  # doctest: +ELLIPSIS +NORMALIZE_WHITESPACE
        8,030,261,248 parameters, head 128256 x 4096; 8192 rows in bfloat16
        32 layers of 32 heads, 8 key-value heads, intermediate size 14336; with activation checkpointing
        8 devices, tensor parallel size 1
        without this package: fits, ... of 64 GiB remain
        with this package:    fits, ... of 64 GiB remain
        ...
        0
    """
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    shape = {name: options.pop(name) for name in SHAPE}
    layers = {name: options.pop(name.replace("-", "_")) for name in (*_LAYERS, "head-dim")}
    model, of_layers = options.pop("model"), None
    given = [f"--{name}" for name, value in {**shape, **layers}.items() if value is not None]
    if model is not None and given:
        parser.error(f"leave out {', '.join(given)} with --model, which has them")
    if model is None:
        _check_given(parser, shape, "--model")
        if len(given) > len(shape):
            head_dim, kv_heads = layers.pop("head-dim"), layers.pop("kv-heads")
            _check_given(parser, layers, "no option of the layers")
            number, heads, intermediate = layers.values()
            of_layers = Layers(number, heads, heads if kv_heads is None else kv_heads, intermediate, head_dim)
    try:
        print(plan(model or dataclasses.replace(Model(*shape.values()), layers=of_layers), **options))
    except ValueError as error:
        parser.error(str(error))
    return 0


def _check_given(parser: argparse.ArgumentParser, values: dict[str, int | None], instead: str) -> None:
    """Exit with an error that names the missing options, if any."""
    missing = [f"--{name}" for name, value in values.items() if value is None]
    if missing:
        parser.error(f"missing {', '.join(missing)}; pass all of --{', --'.join(values)}, or {instead}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_aclnn_ops.plan", description="Estimate whether a model fits on a number of devices."
    )
    parser.add_argument("--version", action="version", version=f"torch_aclnn_ops {__version__}")
    parser.add_argument("--model", help=f"one of {', '.join(MODELS)}; or set the next options for your model")
    for name, what in zip(SHAPE, ("hidden size", "vocabulary size", "total number of parameters"), strict=True):
        parser.add_argument(f"--{name}", type=int, help=what)
    counts = (
        "number of layers",
        "attention heads",
        "key and value heads (default: attention heads)",
        "intermediate size of the MLP",
    )
    for name, what in zip(_LAYERS, counts, strict=True):
        parser.add_argument(f"--{name}", type=int, help=f"for the activations: {what}")
    parser.add_argument("--head-dim", type=int, help="size of a head (default: hidden size / heads)")
    parser.add_argument("--devices", type=int, required=True, help="number of devices")
    for name, default, what in (
        ("tensor-parallel", 1, "devices that share rows and split matrices"),
        ("sequence", 8192, "tokens per sequence"),
        ("micro-batch", 1, "sequences per step of a tensor-parallel group"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--no-checkpointing", dest="checkpointing", action="store_false", help="no activation checkpointing"
    )
    parser.add_argument("--dtype", default="bfloat16", help=f"one of {', '.join(_DTYPES)} (default: %(default)s)")
    parser.add_argument("--memory", type=float, default=64, help="memory of a device in GiB (default: %(default)s)")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if the output is piped to head
    sys.exit(main())
