"""Estimate the memory and time that the language-model head and the optimizer need on Ascend 910B devices.

``python -m torch_aclnn_ops.plan --model llama-3-70b --devices 16`` prints bytes and seconds per device, with and
without this package. The rest of the model, such as the activations of its layers, must fit into the remaining memory.
Devices of a tensor-parallel group share rows and split the vocabulary; different groups have different rows. Weights,
gradients and states are sharded over all devices in float32 (FSDP2), and all-gathered in ``dtype``. docs/scale.md
explains the terms. Times are lower bounds at peak compute and memory throughput, without overlap and collectives.

Source:
    Ascend 910B2: 24 cube cores of 16 x 16 x 16 multiplications at 1.8 GHz are 353.9 TFLOP/s in 16 bits (CANN's
    ``platform_config/Ascend910B2C.ini``, https://gitcode.com/cann/runtime); 64 GB and 1.6 TB/s
    (``docs/zh/develop/cross_platform_migration_guide.md``, https://gitcode.com/cann/ops-nn).
    Workspaces: the tiling of aclnnFusedLinearCrossEntropyLossGrad, which the host NPU allocates too.
    Shapes: ``config.json`` on https://huggingface.co of meta-llama/Meta-Llama-3-8B, meta-llama/Meta-Llama-3-70B,
    Qwen/Qwen2.5-72B and deepseek-ai/DeepSeek-V3, this one without its multi-token prediction.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence

from torch_aclnn_ops._version import __version__

__all__ = ["MODELS", "Costs", "Model", "Plan", "main", "plan"]


def __dir__() -> list[str]:
    return __all__


FLOPS = 24 * 16**3 * 2 * 1.8e9  # per second, for 16-bit matrix products with float32 accumulation
BANDWIDTH = 1.6e12  # bytes per second, device memory
_CUBES = 24
_DTYPES = ("bfloat16", "float16")
_ITEMSIZE = 2  # bytes
_LIBRARY = 16 * 2**20  # bytes that CANN adds to every workspace
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a model.

    Attributes:
        hidden: Hidden size.
        vocab: Vocabulary size.
        parameters: Total number of parameters, including head and embedding.
    """

    hidden: int
    vocab: int
    parameters: int


MODELS = {
    "llama-3-8b": Model(4096, 128256, 8_030_261_248),
    "llama-3-70b": Model(8192, 128256, 70_553_706_496),
    "qwen2.5-72b": Model(8192, 152064, 72_706_203_648),
    "deepseek-v3": Model(7168, 129280, 671_026_419_200),
}


@dataclasses.dataclass(frozen=True)
class Costs:
    """Memory and time of head and optimizer on one device.

    Attributes:
        states: Bytes of weights, gradients, moments and averages of this device's parameters.
        head_weight: Bytes of the head's weight, all-gathered in ``dtype``.
        head_backward: Additional bytes in the head's backward pass: logits, gradients and the operator's workspace.
        step_buffers: Additional bytes in the optimizer step.
        head_seconds: Lower bound of the head's forward and backward pass.
        optimizer_seconds: Lower bound of an optimizer step with its average.
    """

    states: int
    head_weight: int
    head_backward: int
    step_buffers: int
    head_seconds: float
    optimizer_seconds: float

    @property
    def peak(self) -> int:
        """Peak bytes, in the head's backward pass or in the optimizer step."""
        return self.states + max(self.head_weight + self.head_backward, self.step_buffers)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The estimate for a model on a number of devices.

    Attributes:
        model: The shape of the model.
        devices: Number of devices.
        tensor_parallel: Number of devices that share rows and split the vocabulary.
        rows: Tokens per step of a tensor-parallel group.
        dtype: Dtype of matrix products and activations.
        memory: Memory of a device in bytes.
        ours: Costs with this package.
        others: Costs with ``cross_entropy(linear(...).float(), ...)``, ``torch.optim.AdamW`` and a ``lerp`` average.
        collectives: Bytes that a device sends in a step, by purpose.
    """

    model: Model
    devices: int
    tensor_parallel: int
    rows: int
    dtype: str
    memory: int
    ours: Costs
    others: Costs
    collectives: dict[str, int]

    def left(self, costs: Costs) -> int:
        """Return the bytes per device that remain for the rest of the model; negative if it does not fit."""
        return self.memory - costs.peak

    def fewest_devices(self) -> int | None:
        """Return the smallest number of devices that suffices, doubling tensor-parallel groups, or ``None``."""
        for devices in (self.tensor_parallel << power for power in range(21)):
            if self.left(_costs(self.model, devices, self.tensor_parallel, self.rows)[0]) > 0:
                return devices
        return None

    def __str__(self) -> str:
        """Format the estimate as a table."""
        shape, memory, fewest = self.model, self.memory / _GIB, self.fewest_devices()
        lines = [
            f"{shape.parameters:,} parameters, head {shape.vocab} x {shape.hidden}; {self.rows} rows in {self.dtype}",
            f"{self.devices} devices, tensor parallel size {self.tensor_parallel}; minimum {fewest or 'unknown'}",
            f"{'':<58}{'without':>10}{'with':>10}",
        ]
        values = [
            ("weights, gradients, moments and averages, GiB", "states", _GIB),
            ("all-gathered weight of the head, GiB", "head_weight", _GIB),
            ("backward pass of the head, GiB", "head_backward", _GIB),
            ("buffers of the optimizer step, GiB", "step_buffers", _GIB),
            ("peak, GiB", "peak", _GIB),
            ("head, forward and backward, at least, ms", "head_seconds", 1e-3),
            ("optimizer step with average, at least, ms", "optimizer_seconds", 1e-3),
        ]
        both = (self.others, self.ours)
        pairs = [(what, *(getattr(costs, name) / unit for costs in both)) for what, name, unit in values]
        pairs.insert(5, (f"remaining of {memory:g} GiB", *(self.left(costs) / _GIB for costs in both)))
        lines += [f"{what:<58}{without:>10.2f}{ours:>10.2f}" for what, without, ours in pairs]
        lines += [f"{f'{what}, GiB sent':<68}{count / _GIB:>10.3f}" for what, count in self.collectives.items()]
        return "\n".join(lines)


def plan(
    model: str | Model,
    devices: int,
    *,
    tensor_parallel: int = 1,
    sequence: int = 8192,
    micro_batch: int = 1,
    dtype: str = "bfloat16",
    memory: float = 64,
) -> Plan:
    """Estimate the memory and time of head and optimizer on each device.

    Args:
        model: A name in :data:`MODELS`, or a shape.
        devices: Number of devices.
        tensor_parallel: Number of devices that share rows and split the vocabulary; must divide ``devices``.
        sequence: Sequence length in tokens.
        micro_batch: Number of sequences per step of a tensor-parallel group.
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
        >>> found.left(found.ours) > 0  # the states alone take more than 64 GiB
        False
    """
    if isinstance(model, str):
        if model not in MODELS:
            raise ValueError(f"plan: model must be a Model or one of {', '.join(MODELS)}, but it is {model!r}")
        model = MODELS[model]
    counts = {"devices": devices, "tensor_parallel": tensor_parallel, "sequence": sequence, "micro_batch": micro_batch}
    for name, number in {**counts, **dataclasses.asdict(model)}.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"plan: {name} must be an integer of at least 1, but it is {number!r}")
        if number < 1:
            raise ValueError(f"plan: {name} must be an integer of at least 1, but it is {number}")
    if devices % tensor_parallel or tensor_parallel > model.vocab:
        raise ValueError(
            f"plan: tensor_parallel must divide devices = {devices}, and be at most vocab = {model.vocab}, but it is"
            f" {tensor_parallel}"
        )
    if dtype not in _DTYPES:
        raise ValueError(f"plan: dtype must be one of {', '.join(_DTYPES)}, but it is {dtype!r}")
    if not 0 < memory < math.inf:
        raise ValueError(f"plan: memory must be a finite number of GiB above 0, but it is {memory}")
    rows = sequence * micro_batch
    ours, others = _costs(model, devices, tensor_parallel, rows)
    collectives = _collectives(model, devices, tensor_parallel, rows)
    return Plan(model, devices, tensor_parallel, rows, dtype, int(memory * _GIB), ours, others, collectives)


def _costs(model: Model, devices: int, tensor_parallel: int, rows: int) -> tuple[Costs, Costs]:
    """Return the costs with and without this package."""
    hidden = model.hidden
    classes, own = -(-model.vocab // tensor_parallel), -(-model.parameters // devices)
    logits, results = rows * classes, (rows + classes) * hidden
    product = 2 * logits * hidden / FLOPS
    # Both gradients in float32, tiles per cube core, and CANN's constant part.
    workspace = 4 * results + 2 * 4 * _CUBES * (128 * 256 + 384 * hidden) + _LIBRARY
    # Bytes moved per logit: written; read and upcast; read twice for log_softmax, which is written; its gradient
    # written; two reads and one write in its backward pass; read and downcast; read for two products.
    moved = 2 + (2 + 4) + (8 + 4) + 4 + (8 + 4) + (4 + 2) + 2 * 2
    shared = {"states": 20 * own, "head_weight": _ITEMSIZE * classes * hidden}
    ours = Costs(
        **shared,
        head_backward=_ITEMSIZE * results + workspace,
        step_buffers=_LIBRARY,
        head_seconds=4 * product,  # the logits are computed twice
        optimizer_seconds=36 * own / BANDWIDTH,  # per parameter five float32 reads, four writes
    )
    others = Costs(
        **shared,
        # The log-probabilities, their gradient and that of the logits in float32; then two gradients in 16 bits.
        head_backward=max(12 * logits, _ITEMSIZE * (logits + results)),
        step_buffers=4 * own,  # the square roots of the second moments
        head_seconds=3 * product + moved * logits / BANDWIDTH,
        optimizer_seconds=92 * own / BANDWIDTH,  # eight calls of torch._foreach_*, and lerp
    )
    return ours, others


def _collectives(model: Model, devices: int, tensor_parallel: int, rows: int) -> dict[str, int]:
    """Return the bytes that a device sends in ring collectives, in which it forwards all parts but one."""
    hidden, shards = model.hidden, devices // tensor_parallel
    own, head = model.parameters // devices, model.vocab * hidden // devices
    found = {}
    if tensor_parallel > 1:
        others = tensor_parallel - 1
        # Four numbers per row, and 36 that the ranks exchange to validate their arguments.
        found["vocab-parallel all-gather"] = others * 4 * (4 * rows + 36)
        found["vocab-parallel all-reduce"] = 2 * others * 4 * rows * hidden // tensor_parallel
    if shards > 1:
        others = shards - 1
        found["FSDP2 all-gather"] = 2 * others * _ITEMSIZE * own
        found["FSDP2 reduce-scatter"] = others * 4 * own
        found["of these the head's all-gather"] = 2 * others * _ITEMSIZE * head
        found["of these the head's reduce-scatter"] = others * 4 * head
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print an estimate.

    Args:
        arguments: Command-line arguments; ``sys.argv`` if ``None``.

    Returns:
        The exit status: 0, or 2 for invalid arguments.

    Example:
        >>> main(["--model", "llama-3-8b", "--devices", "8"])  # doctest: +ELLIPSIS
        8,030,261,248 parameters, head 128256 x 4096; 8192 rows in bfloat16
        8 devices, tensor parallel size 1; minimum 4
        ...
        0
    """
    parser = argparse.ArgumentParser(
        prog="python -m torch_aclnn_ops.plan", description="Estimate memory and time of head and optimizer per device."
    )
    parser.add_argument("--version", action="version", version=f"torch_aclnn_ops {__version__}")
    parser.add_argument("--model", help=f"one of {', '.join(MODELS)}; or give a shape:")
    for name in ("hidden", "vocab", "parameters"):
        parser.add_argument(f"--{name}", type=int, help="of a model of your own")
    parser.add_argument("--devices", type=int, required=True)
    for name, default in (("tensor-parallel", 1), ("sequence", 8192), ("micro-batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help=f"one of {', '.join(_DTYPES)} (default: %(default)s)")
    parser.add_argument("--memory", type=float, default=64, help="GiB of a device (default: %(default)s)")
    options = vars(parser.parse_args(arguments))
    shape = [options.pop(name) for name in ("hidden", "vocab", "parameters")]
    model = options.pop("model")
    if shape.count(None) != (0 if model is None else len(shape)):
        parser.error("give either --model or all of --hidden, --vocab and --parameters")
    try:
        print(plan(Model(*shape) if model is None else model, **options))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
