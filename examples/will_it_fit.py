"""Will a model fit on NPUs? An estimate of the memory of a device in training, with and without this package.

Run ``python examples/will_it_fit.py --model llama-3-8b --devices 32 --memory 60`` from a checkout. It only calculates,
and needs neither torch nor an NPU. The peak is the states and activations plus the largest of a layer's backward pass
and the head's, or the states and the step's buffers. The terms of a layer do not all reach their maximum at the same
time, so the estimate can be 25% too high. Assumptions:

- Layers are those of transformers' Llama, in 16 bits, with ``npu_fusion_attention``, so that attention scores are never
  stored. With activation checkpointing, each layer saves its input only.
- FSDP2: ``fully_shard`` of the embedding, each layer and the head; weights, gradients and optimizer states in float32.
- Tensor parallelism as in Megatron without sequence parallelism: norms and the residual are not split.
- Without this package, the loss is ``cross_entropy(linear(input, weight).float(), target)``, the optimizer
  ``torch.optim.AdamW`` with ``foreach``, and the EMA is updated by ``lerp``.
- Not included: CANN's runtime, HCCL's buffers and fragmentation. ``--memory`` is in GiB (2**30 bytes).
- Shapes of models are from their ``config.json`` on https://huggingface.co. The workspace is the tiling of CANN's
  aclnnFusedLinearCrossEntropyLossGrad on an Ascend 910B, which has 24 cube cores.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from arguments import whole_number_from

GIB = 2**30
HALF, SINGLE = 2, 4  # bytes per number
CUBES = 24
LIBRARY = 16 * 2**20  # bytes that CANN adds to every workspace


class Model(NamedTuple):
    """The shape of a Llama: an embedding, layers of attention and gated MLP, and an untied head."""

    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of a layer."""
        keys = self.hidden // self.heads * self.kv_heads
        return self.hidden * (2 * self.hidden + 2 * keys + 3 * self.intermediate)

    @property
    def parameters(self) -> int:
        """Number of parameters without biases."""
        return self.hidden * (2 * self.vocab + 2 * self.layers + 1) + self.layers * self.layer_weights


MODELS = {
    "llama-2-7b": Model(4096, 32000, 32, 32, 32, 11008),
    "mistral-7b": Model(4096, 32000, 32, 32, 8, 14336),
    "qwen2.5-7b": Model(3584, 152064, 28, 28, 4, 18944),
    "llama-3-8b": Model(4096, 128256, 32, 32, 8, 14336),
    "qwen2.5-32b": Model(5120, 152064, 64, 40, 8, 27648),
    "llama-3-70b": Model(8192, 128256, 80, 64, 8, 28672),
    "qwen2.5-72b": Model(8192, 152064, 80, 64, 8, 29568),
}


def memory(model: Model, devices: int, parallel: int, rows: int, checkpointing: bool) -> dict[str, tuple[int, int]]:
    """Return the memory of a device in bytes without and with this package, by purpose; the last entry is the peak."""
    own, classes = -(-model.parameters // devices), -(-model.vocab // parallel)
    logits, results = rows * classes, (rows + classes) * model.hidden
    saved, layer = of_layers(model, parallel, rows, checkpointing)
    # log-probabilities, their gradient and that of the logits in float32; then logits and two gradients in 16 bits
    plain = max(3 * SINGLE * logits, HALF * (logits + results))
    # both gradients in 16 bits and in float32, and two tiles of each cube core
    fused = (HALF + SINGLE) * results + 2 * SINGLE * CUBES * (128 * 256 + 384 * model.hidden) + LIBRARY
    parts = {
        "weights, gradients, moments and EMA weights": (5 * SINGLE * own,) * 2,
        "activations that the layers save": (saved,) * 2,
        "backward pass of a layer": (layer,) * 2,
        "all-gathered weight of the head": (HALF * classes * model.hidden,) * 2,
        "backward pass of the head": (plain, fused),
        "buffers of the optimizer step": (SINGLE * own, LIBRARY),  # AdamW: square roots of second moments
    }

    def peak(states: int, saved: int, layer: int, weight: int, head: int, step: int) -> int:
        return states + max(saved + max(layer, weight + head), step)

    without, ours = (peak(*side) for side in zip(*parts.values(), strict=True))
    return {**parts, "peak": (without, ours)}


def of_layers(model: Model, parallel: int, rows: int, checkpointing: bool) -> tuple[int, int]:
    """Return the memory in bytes that all layers save, and that the backward pass of one layer needs in addition."""
    heads, kv_heads, inner = (-(-number // parallel) for number in (model.heads, model.kv_heads, model.intermediate))
    queries, keys = (model.hidden // model.heads * number for number in (heads, kv_heads))
    # A norm saves its input in float32 and, in 16 bits, the result before and after the product with its weight.
    norm = (SINGLE + 2 * HALF) * model.hidden + SINGLE
    # query, key, value and result, and eight float32 maxima and sums of each head
    attention = HALF * 2 * (queries + keys) + 2 * 8 * SINGLE * heads
    gated = HALF * 4 * inner  # both halves, the activation of one, and the product
    layer = 2 * norm + attention + gated
    saved = model.layers * (HALF * model.hidden if checkpointing else layer) + norm  # and the last norm
    # in a norm four gradients in float32, and those of the residual; in the MLP two more halves, and the residual
    recomputed, in_norm, in_mlp = layer * checkpointing, 24 * model.hidden, HALF * 2 * (inner + model.hidden)
    working = max(in_norm, recomputed + in_mlp, recomputed - gated + in_norm)
    # FSDP2: weights of this layer and the next, its gradients, and those of the layer before (or the head) in float32
    weights = model.hidden * (2 * queries + 2 * keys + 3 * inner)
    reduced = max(weights, model.hidden * -(-model.vocab // parallel))
    return rows * saved, rows * working + 3 * HALF * weights + SINGLE * reduced


def fewest(model: Model, parallel: int, rows: int, checkpointing: bool, limit: int) -> tuple[str, ...]:
    """Return the number of devices, doubled until the model fits, without and with this package."""
    numbers = [parallel * 2**power for power in range(17)]
    peaks = [memory(model, number, parallel, rows, checkpointing)["peak"] for number in numbers]
    fits = [[str(n) for n, peak in zip(numbers, peaks, strict=True) if peak[side] <= limit] for side in (0, 1)]
    return tuple(one[0] if one else "none" for one in fits)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the estimate that the command line requests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="the shape (default: %(default)s)")
    for field in Model._fields:
        name = f"--{field.replace('_', '-')}"
        parser.add_argument(name, type=whole_number_from(1), help="in place of that of --model")
    parser.add_argument("--devices", type=whole_number_from(1), required=True)
    parser.add_argument("--tensor-parallel", type=whole_number_from(1), default=1, help="divides --devices")
    parser.add_argument("--rows", type=whole_number_from(1), default=8192, help="tokens per step of a group")
    parser.add_argument("--no-checkpointing", action="store_true", help="layers are not recomputed")
    parser.add_argument("--memory", type=whole_number_from(1), default=64, help="GiB of a device")
    options = vars(parser.parse_args(arguments))
    model = MODELS[options["model"]]._replace(**{field: options[field] for field in Model._fields if options[field]})
    devices, parallel, rows = options["devices"], options["tensor_parallel"], options["rows"]
    if devices % parallel or model.hidden % model.heads:
        given = f"{devices} and {parallel}, {model.hidden} and {model.heads}"
        parser.error(
            f"--devices must be a multiple of --tensor-parallel, and --hidden of --heads, but they are {given}"
        )
    checkpointing, limit = not options["no_checkpointing"], options["memory"] * GIB
    found = memory(model, devices, parallel, rows, checkpointing)
    print(f"{model.parameters:,} parameters on {devices} devices, tensor parallel size {parallel}, {rows} rows")
    print(f"{'GiB of a device':<46}{'without':>10}{'with':>10}")
    for what, (without, ours) in found.items():
        print(f"{what:<46}{without / GIB:>10.2f}{ours / GIB:>10.2f}")
    answers = ("yes" if peak <= limit else "no" for peak in found["peak"])
    numbers = fewest(model, parallel, rows, checkpointing, limit)
    for what, sides in ((f"fits in {options['memory']} GiB", answers), ("devices, doubled until it fits", numbers)):
        print("{:<46}{:>10}{:>10}".format(what, *sides))


if __name__ == "__main__":
    main()
