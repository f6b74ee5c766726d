"""What the vocabulary head and the optimizer of a model take of Ascend 910B devices, by formulas.

``python -m torch_aclnn_ops.plan --model llama-3-70b --devices 16`` prints bytes and seconds of a device, with this
package and without. Everything else of the model, such as the activations of its layers, has to fit into what is left.
The devices of a tensor-parallel group share rows and split the vocabulary, others have rows of their own. Weights,
gradients and states are sharded over all of them in float32 (FSDP2), and gathered in ``dtype``. docs/scale.md has the
terms. Times are lower bounds: operations at the peak of the matrix units and bytes at the peak of the memory, one
after the other, without collectives.

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


FLOPS = 24 * 16**3 * 2 * 1.8e9  # a second, of 16-bit matrix products with float32 sums
BANDWIDTH = 1.6e12  # bytes a second, of the device's memory
_CUBES = 24
_DTYPES = ("bfloat16", "float16")
_ITEMSIZE = 2  # of these
_LIBRARY = 16 * 2**20  # bytes that CANN adds to every workspace
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a model.

    Attributes:
        hidden: Features of a row of the head.
        vocab: Classes.
        parameters: Of the whole model, head and embedding included.
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
    """What head and optimizer take of one device.

    Attributes:
        states: Bytes of weights, gradients, moments and averages of this device's parameters.
        head_weight: Bytes of the head's weight, gathered in ``dtype``.
        head_backward: Bytes held beside it in its backward pass: of logits, of gradients, of the operator's workspace.
        step_buffers: Bytes that a step of the optimizer holds beside them.
        head_seconds: Forward and backward of the head, at least.
        optimizer_seconds: A step and its average, at least.
    """

    states: int
    head_weight: int
    head_backward: int
    step_buffers: int
    head_seconds: float
    optimizer_seconds: float

    @property
    def peak(self) -> int:
        """Bytes at the worse of two moments: the head's backward pass, and the step."""
        return self.states + max(self.head_weight + self.head_backward, self.step_buffers)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model on devices.

    Attributes:
        model: Its shape.
        devices: How many there are.
        tensor_parallel: Devices that share rows, and split the vocabulary.
        rows: Tokens of a device's step, those of the devices of its tensor-parallel group too.
        dtype: Of products and activations.
        memory: Bytes of a device.
        ours: With this package.
        others: With ``cross_entropy(linear(...).float(), ...)``, ``torch.optim.AdamW`` and an average by ``lerp``.
        collectives: Bytes that a device sends in a step, by what for.
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
        """Return the bytes of a device that are left for the rest of the model; negative if it does not fit."""
        return self.memory - costs.peak

    def fewest_devices(self) -> int | None:
        """Return how many devices hold head and optimizer, by doubling tensor-parallel groups; ``None`` for none."""
        for devices in (self.tensor_parallel << power for power in range(21)):
            if self.left(_costs(self.model, devices, self.tensor_parallel, self.rows)[0]) > 0:
                return devices
        return None

    def __str__(self) -> str:
        """Return a table of several lines."""
        shape, memory, fewest = self.model, self.memory / _GIB, self.fewest_devices()
        lines = [
            f"{shape.parameters:,} parameters, head {shape.vocab} x {shape.hidden}; {self.rows} rows in {self.dtype}",
            f"{self.devices} devices, {self.tensor_parallel} to a vocabulary; they fit on {fewest or 'no number'}",
            f"{'':<58}{'without':>10}{'with':>10}",
        ]
        values = [
            ("weights, gradients, moments and averages, GiB", "states", _GIB),
            ("weight of the head, gathered, GiB", "head_weight", _GIB),
            ("backward pass of the head, GiB", "head_backward", _GIB),
            ("buffers of the optimizer's step, GiB", "step_buffers", _GIB),
            ("peak of these, GiB", "peak", _GIB),
            ("head, forward and backward, at least, ms", "head_seconds", 1e-3),
            ("step of the optimizer and average, at least, ms", "optimizer_seconds", 1e-3),
        ]
        both = (self.others, self.ours)
        pairs = [(what, *(getattr(costs, name) / unit for costs in both)) for what, name, unit in values]
        pairs.insert(5, (f"left of {memory:g} GiB", *(self.left(costs) / _GIB for costs in both)))
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
    """Compute what head and optimizer take of each device.

    Args:
        model: A name in :data:`MODELS`, or a shape.
        devices: How many there are.
        tensor_parallel: How many of them share rows and split the vocabulary; divides ``devices``.
        sequence: Tokens of a sequence.
        micro_batch: Sequences whose loss is computed at once, on a device or on those of a tensor-parallel group.
        dtype: ``"bfloat16"`` or ``"float16"``, of products and activations.
        memory: GiB of a device.

    Returns:
        Bytes and seconds.

    Raises:
        TypeError: A number is not one.
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
            raise TypeError(f"plan: {name} must be a whole number of at least 1, but it is {number!r}")
        if number < 1:
            raise ValueError(f"plan: {name} must be a whole number of at least 1, but it is {number}")
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
    """Return the costs with this package, and those without."""
    hidden = model.hidden
    classes, own = -(-model.vocab // tensor_parallel), -(-model.parameters // devices)
    logits, results = rows * classes, (rows + classes) * hidden
    product = 2 * logits * hidden / FLOPS
    # Both gradients in float32, tiles of each cube core, and CANN's own.
    workspace = 4 * results + 2 * 4 * _CUBES * (128 * 256 + 384 * hidden) + _LIBRARY
    # Bytes of each logit that are moved: written; read and widened; read twice for log_softmax, which is written; its
    # gradient written; two read and one written in its backward pass; read and narrowed; read for two products.
    moved = 2 + (2 + 4) + (8 + 4) + 4 + (8 + 4) + (4 + 2) + 2 * 2
    shared = {"states": 20 * own, "head_weight": _ITEMSIZE * classes * hidden}
    ours = Costs(
        **shared,
        head_backward=_ITEMSIZE * results + workspace,
        step_buffers=_LIBRARY,
        head_seconds=4 * product,  # the logits are made twice
        optimizer_seconds=36 * own / BANDWIDTH,  # five float32 numbers of a parameter are read, four written
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
    """Return the bytes that a device sends by rings, in which it passes on all parts but one."""
    hidden, shards = model.hidden, devices // tensor_parallel
    own, head = model.parameters // devices, model.vocab * hidden // devices
    found = {}
    if tensor_parallel > 1:
        others = tensor_parallel - 1
        # Four numbers a row, and 36 by which the ranks find out whether their calls fit together.
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
    """Print a plan.

    Args:
        arguments: Of the command line; those of the process if ``None``.

    Returns:
        The exit status: 0, or 2 for wrong arguments.

    Example:
        >>> main(["--model", "llama-3-8b", "--devices", "8"])  # doctest: +ELLIPSIS
        8,030,261,248 parameters, head 128256 x 4096; 8192 rows in bfloat16
        8 devices, 1 to a vocabulary; they fit on 4
        ...
        0
    """
    parser = argparse.ArgumentParser(
        prog="python -m torch_aclnn_ops.plan", description="What head and optimizer of a model take of each device."
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
