"""The formulas of torch_aclnn_ops.plan: memory and time of a model on one device, and what it sends."""

import dataclasses

FLOPS = 24 * 16**3 * 2 * 1.8e9  # per second, for 16-bit matrix products with float32 accumulation
BANDWIDTH = 1.6e12  # bytes per second, device memory
_CUBES = 24
_ITEMSIZE = 2  # bytes
_LIBRARY = 16 * 2**20  # bytes that CANN adds to every workspace


@dataclasses.dataclass(frozen=True)
class Layers:
    """The shape of the layers of a Llama: RMSNorm, attention with grouped keys, RMSNorm, gated MLP.

    Attributes:
        number: Number of layers.
        heads: Number of attention heads.
        kv_heads: Number of key and value heads.
        intermediate: Intermediate size of the MLP.
        head_dim: Size of a head; the hidden size divided by ``heads`` if ``None``.
    """

    number: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a model.

    Attributes:
        hidden: Hidden size.
        vocab: Vocabulary size.
        parameters: Total number of parameters, including head and embedding.
        layers: Shape of the layers. If ``None``, activations are not included.
    """

    hidden: int
    vocab: int
    parameters: int
    layers: Layers | None = None


MODELS = {
    "llama-3-8b": Model(4096, 128256, 8_030_261_248, Layers(32, 32, 8, 14336)),
    "llama-3-70b": Model(8192, 128256, 70_553_706_496, Layers(80, 64, 8, 28672)),
    "qwen2.5-72b": Model(8192, 152064, 72_706_203_648, Layers(80, 64, 8, 29568)),
    "deepseek-v3": Model(7168, 129280, 671_026_419_200),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """How a model is trained.

    Attributes:
        devices: Number of devices.
        tensor_parallel: Number of devices that share rows and split the vocabulary and the layers' matrices.
        rows: Tokens per step of a tensor-parallel group.
        checkpointing: Whether each layer is recomputed in the backward pass from its input.
    """

    devices: int
    tensor_parallel: int
    rows: int
    checkpointing: bool


@dataclasses.dataclass(frozen=True)
class Costs:
    """Memory and time on one device.

    Attributes:
        states: Bytes of weights, gradients, moments and EMA weights of this device's parameters.
        activations: Bytes that the layers save for the backward pass.
        layer_backward: Additional bytes in the backward pass of a layer: recomputed activations, their gradients, the
            all-gathered weights of two layers, and gradients of weights before and during their reduction.
        head_weight: Bytes of the head's weight, all-gathered in ``dtype``.
        head_backward: Additional bytes in the head's backward pass: logits, gradients and the operator's workspace.
        step_buffers: Additional bytes in the optimizer step.
        head_seconds: Lower bound of the head's forward and backward pass.
        optimizer_seconds: Lower bound of an optimizer step with its EMA.
    """

    states: int
    activations: int
    layer_backward: int
    head_weight: int
    head_backward: int
    step_buffers: int
    head_seconds: float
    optimizer_seconds: float

    @property
    def peak(self) -> int:
        """Peak bytes: in the backward pass of the head or of a layer, or in the optimizer step."""
        backward = max(self.head_weight + self.head_backward, self.layer_backward)
        return self.states + max(self.activations + backward, self.step_buffers)


def costs(model: Model, run: Run) -> tuple[Costs, Costs]:
    """Return the costs with and without this package."""
    hidden, rows = model.hidden, run.rows
    classes, own = -(-model.vocab // run.tensor_parallel), -(-model.parameters // run.devices)
    logits, results = rows * classes, (rows + classes) * hidden
    product = 2 * logits * hidden / FLOPS
    # Both gradients in float32, tiles per cube core, and CANN's constant part.
    workspace = 4 * results + 2 * 4 * _CUBES * (128 * 256 + 384 * hidden) + _LIBRARY
    # Bytes moved per logit: written; read and upcast; read twice for log_softmax, which is written; its gradient
    # written; two reads and one write in its backward pass; read and downcast; read for two products.
    moved = 2 + (2 + 4) + (8 + 4) + 4 + (8 + 4) + (4 + 2) + 2 * 2
    activations, layer_backward = (0, 0) if model.layers is None else _layers(model, model.layers, run)
    ours = Costs(
        states=20 * own,
        activations=activations,
        layer_backward=layer_backward,
        head_weight=_ITEMSIZE * classes * hidden,
        head_backward=_ITEMSIZE * results + workspace,
        step_buffers=_LIBRARY,
        head_seconds=4 * product,  # the logits are computed twice
        optimizer_seconds=36 * own / BANDWIDTH,  # per parameter five float32 reads, four writes
    )
    others = dataclasses.replace(
        ours,
        # The log-probabilities, their gradient and that of the logits in float32; then two gradients in 16 bits.
        head_backward=max(12 * logits, _ITEMSIZE * (logits + results)),
        step_buffers=4 * own,  # the square roots of the second moments
        head_seconds=3 * product + moved * logits / BANDWIDTH,
        optimizer_seconds=92 * own / BANDWIDTH,  # eight calls of torch._foreach_*, and lerp
    )
    return ours, others


def _layers(model: Model, layers: Layers, run: Run) -> tuple[int, int]:
    """Return the bytes that all layers save, and those that the backward pass of one takes besides.

    This is transformers' Llama with ``npu_fusion_attention``, whose scores are never materialized. Matrices are split
    as in Megatron, without sequence parallelism: queries, keys, values and the MLP are split, the norms are not.
    """
    hidden, parallel = model.hidden, run.tensor_parallel
    heads, kv_heads, inner = (-(-n // parallel) for n in (layers.heads, layers.kv_heads, layers.intermediate))
    head_dim = layers.head_dim or hidden // layers.heads
    queries, keys = head_dim * heads, head_dim * kv_heads
    # A norm saves its input in float32 and, in 16 bits, the result before and after the product with its weight.
    norm = (4 + 2 * _ITEMSIZE) * hidden + 4
    # Attention saves query, key, value and result, and eight float32 maxima and sums of each head.
    attention = _ITEMSIZE * 2 * (queries + keys) + 2 * 8 * 4 * heads
    gated = _ITEMSIZE * 4 * inner  # both halves, the activation of one, and the product
    layer = 2 * norm + attention + gated
    saved = layers.number * (_ITEMSIZE * hidden if run.checkpointing else layer) + norm  # and the last norm
    recomputed = layer if run.checkpointing else 0
    # Gradients in a norm: four in float32, and those of the residual. In the MLP: two more halves, and the residual.
    in_norm, in_mlp = 24 * hidden, _ITEMSIZE * 2 * (inner + hidden)
    working = max(in_norm, recomputed + in_mlp, recomputed - gated + in_norm)
    # FSDP2: this layer's weights, the next one's, this layer's gradients, and those of the layer before in float32.
    weights = hidden * (2 * queries + 2 * keys + 3 * inner)
    reduced = max(weights, hidden * -(-model.vocab // parallel))  # the head is before the last layer
    return run.rows * saved, run.rows * working + 3 * _ITEMSIZE * weights + 4 * reduced


def least_parameters(model: Model) -> int:
    """Return the parameters of head and layers if embedding and head are tied, and the MLP has two matrices."""
    found = model.vocab * model.hidden
    if model.layers is not None:
        layers = model.layers
        attention = 2 * (layers.heads + layers.kv_heads) * (layers.head_dim or model.hidden // layers.heads)
        found += layers.number * model.hidden * (attention + 2 * layers.intermediate)
    return found


def collectives(model: Model, run: Run) -> dict[str, int]:
    """Return the bytes that a device sends in ring collectives, in which it forwards all parts but one."""
    hidden, rows, parallel = model.hidden, run.rows, run.tensor_parallel
    shards = run.devices // parallel
    own, head = model.parameters // run.devices, model.vocab * hidden // run.devices
    found = {}
    if parallel > 1:
        others = parallel - 1
        # Four numbers per row, and 55 that the ranks exchange to validate their arguments.
        found["vocab-parallel all-gather"] = others * 4 * (4 * rows + 55)
        found["vocab-parallel all-reduce"] = 2 * others * 4 * rows * hidden // parallel
    if shards > 1:
        others = shards - 1
        found["FSDP2 all-gather"] = 2 * others * _ITEMSIZE * own
        found["FSDP2 reduce-scatter"] = others * 4 * own
        found["of these the head's all-gather"] = 2 * others * _ITEMSIZE * head
        found["of these the head's reduce-scatter"] = others * 4 * head
    return found
