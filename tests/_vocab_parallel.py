"""Losses on a head that is sharded over processes, for test_vocab_parallel.py.

A case returns tensors by name. The prefix of a name states how the processes' tensors form that of a single process:
each has a ``copy``, a copy up to rounding (``alike``), a ``shard`` of its classes, or a ``part`` of a sum.
"""

from functools import partial

from torch_aclnn_ops import functional as F
from torch_aclnn_ops._torch_compat.public import COMPILES_COLLECTIVES
from torch_aclnn_ops.functional._head.shards import Members, sum_over_group

import torch
import torch.distributed as dist
from host_npu.testing import results_of
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests import _linear_kl_div as divergences
from tests._linear_kl_div import CLASSES, FEATURES, ROWS

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SOME_OUTPUTS = ("log_probabilities", "entropy", "z_loss", "predicted_tokens")
OUTPUTS = (*SOME_OUTPUTS, "token_accuracy")
RICH = {"outputs": ("log_probabilities", "entropy"), "label_smoothing": 0.1, "softcap": 3.0, "lse_square_scale": 0.25}
SPLITS = ("even", "uneven", "one class")


def sizes_of(split, world_size):
    """Return the number of classes of each rank."""
    if world_size == 1:
        return (CLASSES,)
    sizes = [CLASSES // world_size if split == "even" else 2 + 3 * rank for rank in range(world_size)]
    if split == "one class":
        sizes[-1] = 1
    largest = max(range(world_size), key=sizes.__getitem__)
    sizes[largest] += CLASSES - sum(sizes)
    return tuple(sizes)


class Vocabulary:
    """This rank's shard of the vocabulary; without ranks, the full vocabulary."""

    def __init__(self, split="uneven", world_size=None, rank=0, dtype=torch.float64, device="cpu"):
        self.sizes = (CLASSES,) if world_size is None else sizes_of(split, world_size)
        self.rank = rank
        self.dtype = dtype
        self.device = device
        self.is_whole = world_size is None
        self.classes = slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))
        self.options = {} if self.is_whole else {"process_group": dist.group.WORLD, "vocab_sizes": self.sizes}

    def draw(self, *shape, seed=0, scale=1.0):
        """Return numbers that are the same in every dtype."""
        generator = torch.Generator().manual_seed(1000 + seed)
        drawn = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.bfloat16().to(self.dtype).to(self.device)  # torch_npu casts to float64 only on a CPU

    def whole_arguments(self):
        """Return the arguments with the full head."""
        return Vocabulary(dtype=self.dtype, device=self.device).arguments()

    def mesh(self):
        """Return the mesh of all processes."""
        return dist.device_mesh.init_device_mesh(self.device, (dist.get_world_size(),))

    def arguments(self, grad=True):
        """Return the input, this process's weight and bias, and targets of which two are ignored."""
        target = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(2))
        target[3] = target[8] = -100
        target[0], target[1] = 0, CLASSES - 1
        tensors = (
            self.draw(ROWS, FEATURES, seed=1),
            self.draw(CLASSES, FEATURES, seed=2)[self.classes].clone(),
            self.draw(CLASSES, seed=3)[self.classes].clone(),
        )
        return *(tensor.requires_grad_(grad) for tensor in tensors), target.to(self.device)

    def sum(self, part):
        """Sum the processes' values differentiably."""
        if self.is_whole:
            return part
        return sum_over_group(part, Members.of("linear_cross_entropy", dist.group.WORLD))

    def loss(self, input, linear_weight, linear_bias, target, **options):
        """Return a number that depends on all results."""
        if self.is_whole and "max_memory" not in options:
            # Makes one process use the same kernels as several, which have no case for few logits with fewer roundings.
            options.setdefault("chunk_size", ROWS)
        result = F.linear_cross_entropy(
            input, linear_weight, target, linear_bias=linear_bias, **self.options, **options
        )
        results = [result] if isinstance(result, torch.Tensor) else [one for one in result if one is not None]
        seeds = range(50, 50 + len(results))
        differentiable = [(one, seed) for one, seed in zip(results, seeds, strict=True) if one.requires_grad]
        return results, sum((one * self.draw(*one.shape, seed=seed)).sum() for one, seed in differentiable)


def soft(vocabulary):
    """Return probabilities."""
    logits = vocabulary.draw(ROWS, CLASSES, seed=4).cpu().double()
    return logits.softmax(1).bfloat16().to(vocabulary.dtype).to(vocabulary.device)


def class_weights(vocabulary):
    return vocabulary.draw(CLASSES, seed=5).abs()


def token_weights(vocabulary):
    return vocabulary.draw(ROWS, seed=6).abs()


WEIGHTS = {"weight": class_weights, "token_weight": token_weights}
# Options of the function; functions compute an option from the vocabulary.
OPTIONS = {
    "plain": {},
    "ignore_index": {"ignore_index": 0, "target": lambda vocabulary: vocabulary.arguments()[-1].clamp(min=0)},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "class weights": {"weight": class_weights},
    "label smoothing": {"label_smoothing": 0.1},
    "label smoothing and class weights": {"label_smoothing": 0.1, "weight": class_weights},
    "softcap": {"softcap": 2.0},
    "z-loss": {"lse_square_scale": 0.25},
    "temperature": {"temperature": 0.5},
    "token weights": {"token_weight": token_weights},
    "probabilities": {"target": soft},
    "probabilities and class weights": {"target": soft, "label_smoothing": 0.2, "weight": class_weights},
    "outputs": {"outputs": OUTPUTS},
    "outputs of none": {"outputs": OUTPUTS, "reduction": "none", "temperature": 2.0, "lse_square_scale": 0.1},
    "shift": {"shift": 1, "outputs": ("logsumexp", "log_probabilities"), "reduction": "none"},
    "chunks": {"chunk_size": 4, "label_smoothing": 0.1},
    "nothing counts": {
        "ignore_index": 7,
        "target": lambda vocabulary: torch.full((ROWS,), 7, device=vocabulary.device),
        "reduction": "sum",
    },
    "everything": {**RICH, **WEIGHTS, "outputs": SOME_OUTPUTS, "temperature": 0.7},
}


def _call(vocabulary, name, **more):
    """Return the arguments to differentiate by, and the call with some options."""
    options = {key: make(vocabulary) if callable(make) else make for key, make in OPTIONS[name].items()}
    input, weight, linear_bias, target = vocabulary.arguments()
    target = options.pop("target", target)
    arguments = input, weight, linear_bias
    return arguments, partial(vocabulary.loss, *arguments, target, **options, **more)


def named(found):
    """Return gradients with respect to input, weight and bias by their names."""
    return dict(zip(("copy.input", "shard.weight", "shard.bias"), found, strict=False))


def gradients(vocabulary, name, **more):
    """Return the results of a call and its gradients."""
    arguments, call = _call(vocabulary, name, **more)
    results, total = call()
    found = torch.autograd.grad(total, arguments)
    return {f"copy.{i}": one for i, one in enumerate(results)} | named(found)


def float32_weights(vocabulary):
    """Float32 weights of classes and rows, with 16-bit rows."""
    weights = {"weight": torch.linspace(0.1, 1, CLASSES), "token_weight": torch.linspace(1, 2, ROWS)}
    input, weight, bias, target = vocabulary.arguments()
    dtype = torch.promote_types(torch.float32, vocabulary.dtype)
    weights = {name: one.to(dtype).to(vocabulary.device) for name, one in weights.items()}
    results, total = vocabulary.loss(input, weight, bias, target, **weights, label_smoothing=0.1)
    found = torch.autograd.grad(total, (input, weight))
    return {"copy.loss": results[0], **named(found)}


def sizes_found_by_a_collective(vocabulary):
    """Find the sizes by a collective, without vocab_sizes."""
    vocabulary.options.pop("vocab_sizes", None)
    return gradients(vocabulary, "everything")


def partial_input_gradient(vocabulary):
    """The input's gradient left as a part of the sum."""
    more = {} if vocabulary.is_whole else {"reduce_input_grad": False}
    found = gradients(vocabulary, "everything", **more)
    return {"part.input": found.pop("copy.input")} | found


def frozen_head(vocabulary):
    """Only the input needs a gradient."""
    input, weight, bias, target = vocabulary.arguments()
    _, total = vocabulary.loss(input, weight.detach(), bias.detach(), target)
    return {"copy.input": torch.autograd.grad(total, input)[0]}


def gradients_of_target_and_weights(vocabulary):
    """Probabilities, class weights and token weights are differentiable."""
    input, weight, bias, _ = vocabulary.arguments()
    others = [make(vocabulary).requires_grad_() for make in (soft, class_weights, token_weights)]
    target, *weights = others
    options = dict(zip(("weight", "token_weight"), weights, strict=True))
    _, total = vocabulary.loss(input, weight, bias, target, **options, label_smoothing=0.1)
    found = torch.autograd.grad(total, others)
    return dict(zip(("copy.target", "copy.class_weight", "copy.token_weight"), found, strict=True))


def second_derivatives(vocabulary):
    """Gradients of a function of all gradients."""
    *arguments, target = vocabulary.arguments()
    _, total = vocabulary.loss(*arguments, target, **RICH)
    first = torch.autograd.grad(total, arguments, create_graph=True)
    directions = (
        vocabulary.draw(ROWS, FEATURES, seed=11),
        vocabulary.draw(CLASSES, FEATURES, seed=12)[vocabulary.classes],
        vocabulary.draw(CLASSES, seed=13)[vocabulary.classes],
    )
    of_input, *of_shard = ((one * direction).sum() for one, direction in zip(first, directions, strict=True))
    second = torch.autograd.grad(of_input + vocabulary.sum(sum(of_shard)), arguments)
    return named(second)


def _as_function(vocabulary, **options):
    *arguments, target = vocabulary.arguments(grad=False)

    def function(input, weight, bias):
        result = F.linear_cross_entropy(input, weight, target, linear_bias=bias, **vocabulary.options, **options)
        if isinstance(result, torch.Tensor):
            return result
        factors = torch.arange(ROWS, device=vocabulary.device)
        return result.loss + (result.entropy * factors).sum() - result.log_probabilities.square().sum()

    return function, arguments


def forward_over_reverse(vocabulary):
    """A Hessian times a vector."""
    function, (input, weight, bias) = _as_function(vocabulary, **RICH)
    gradient = torch.func.grad(lambda input: function(input, weight, bias))
    tangent = vocabulary.draw(ROWS, FEATURES, seed=11)
    return {"copy.product": torch.func.jvp(gradient, (input,), (tangent,))[1]}


def batched(vocabulary):
    """Vmap over inputs, and over their gradients."""
    function, (_, weight, bias) = _as_function(vocabulary, **RICH)
    inputs = vocabulary.draw(3, ROWS, FEATURES, seed=21)
    losses = torch.func.vmap(function, (0, None, None))(inputs, weight, bias)
    of_input, of_weight = torch.func.vmap(torch.func.grad(function, (0, 1)), (0, None, None))(inputs, weight, bias)
    return {"copy.losses": losses, "copy.input": of_input, "shard.weight": of_weight.movedim(1, 0)}


def distributed_tensors(vocabulary):
    """A head and bias that are DTensors sharded by classes, and a replicated DTensor as input."""
    *arguments, target = vocabulary.whole_arguments()
    if not vocabulary.is_whole:
        mesh = vocabulary.mesh()
        placements = ([Replicate()], [Shard(0)], [Shard(0)])
        arguments = [
            distribute_tensor(one.detach(), mesh, placement).requires_grad_()
            for one, placement in zip(arguments, placements, strict=True)
        ]
        vocabulary.options = {}
    _, total = vocabulary.loss(*arguments, target, **RICH)
    total.backward()
    if not vocabulary.is_whole:
        assert [list(one.grad.placements) for one in arguments] == list(placements)
    gradients = (one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad for one in arguments)
    return dict(zip(("copy.input", "copy.weight", "copy.bias"), gradients, strict=True))


def distributed_head_and_a_group(vocabulary):
    """A DTensor head, and the group of an equal mesh."""
    input, weight, _, target = vocabulary.whole_arguments()
    options = {}
    if not vocabulary.is_whole:
        mesh = vocabulary.mesh()
        weight = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
        options["process_group"] = dist.new_group(range(dist.get_world_size()))
    loss = F.linear_cross_entropy(input, weight, target, **options)
    of_input, of_weight = torch.autograd.grad(loss, (input, weight))
    of_weight = of_weight.full_tensor() if isinstance(of_weight, DTensor) else of_weight
    return {"copy.loss": loss, "copy.input": of_input, "copy.weight": of_weight}


def compiled(vocabulary):
    """One graph, forward and backward."""
    input, weight, bias, target = vocabulary.arguments()
    options = {"label_smoothing": 0.1, "outputs": ("entropy", "predicted_tokens"), **vocabulary.options}

    def function(input, weight, bias, target):
        return F.linear_cross_entropy(input, weight, target, linear_bias=bias, **options)

    if not vocabulary.is_whole:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    result = function(input, weight, bias, target)
    found = torch.autograd.grad(result.loss + result.entropy.square().sum(), (input, weight, bias))
    return {"copy.loss": result.loss, "copy.tokens": result.predicted_tokens, **named(found)}


def groups_of_some_processes(vocabulary):
    """Every other process in one group, the others in another."""
    if not vocabulary.is_whole:
        world_size = dist.get_world_size()
        everyone = [list(range(start, world_size, 2)) for start in range(min(world_size, 2))]
        groups = [dist.new_group(ranks) for ranks in everyone]
        group, ranks = groups[vocabulary.rank % 2], everyone[vocabulary.rank % 2]
        vocabulary = Vocabulary("uneven", len(ranks), ranks.index(vocabulary.rank), device=vocabulary.device)
        vocabulary.options["process_group"] = group
    found = gradients(vocabulary, "everything")
    # Groups of different sizes round differently.
    return {key.replace("copy", "alike"): value for key, value in found.items() if key.startswith("copy")}


def autocast(vocabulary):
    """Matrix products in bfloat16, for float32 tensors."""
    vocabulary.dtype = torch.float32
    input, weight, bias, target = vocabulary.arguments()
    with torch.autocast(vocabulary.device, torch.bfloat16):
        (loss,), _ = vocabulary.loss(input, weight, bias, soft(vocabulary), weight=vocabulary.draw(CLASSES).abs())
    (of_weight,) = torch.autograd.grad(loss, weight)
    assert loss.dtype == of_weight.dtype == torch.float32
    return {"copy.loss": loss.bfloat16(), "shard.weight": of_weight.bfloat16()}


def number_of_collectives(vocabulary):
    """Collectives of a forward and backward pass, for each of the options, and for both without vocab_sizes."""
    if vocabulary.is_whole:
        return {"copy.numbers": torch.tensor([[1, 1]] * len(OPTIONS) + [[2, 1]])}
    numbers = [_collectives(vocabulary, name) for name in OPTIONS]
    del vocabulary.options["vocab_sizes"]
    return {"copy.numbers": torch.tensor([*numbers, _collectives(vocabulary, "plain")])}


def _collectives(vocabulary, name):
    arguments, call = _call(vocabulary, name)
    with CommDebugMode() as forward:
        _, total = call()
    with CommDebugMode() as backward:
        torch.autograd.grad(total, arguments)
    return forward.get_total_counts(), backward.get_total_counts()


FUNCTIONS = (sizes_found_by_a_collective, partial_input_gradient, frozen_head, *[compiled] * COMPILES_COLLECTIVES)
FUNCTIONS += (gradients_of_target_and_weights, second_derivatives, forward_over_reverse, batched, distributed_tensors)
FUNCTIONS += (distributed_head_and_a_group, groups_of_some_processes, number_of_collectives)


def _with_options(name):
    return lambda vocabulary: gradients(vocabulary, name)


# A function of a vocabulary, its split, and the dtype.
CASES = {
    f"{name}, {dtype}": (_with_options(name), "uneven", dtype)
    for name in OPTIONS
    for dtype in DTYPES
    if dtype != "float16" or name == "everything"
}
CASES |= {
    f"{name}, {split}": (_with_options(name), split, "float64")
    for name in ("everything", "probabilities and class weights")
    for split in SPLITS
}
CASES |= {f"{function.__name__}, uneven": (function, "uneven", "float64") for function in FUNCTIONS}
CASES |= divergences.CASES
CASES["float32 weights"] = (float32_weights, "uneven", "bfloat16")
CASES["autocast"] = (autocast, "uneven", "bfloat16")


def results(device, names):
    """Run the cases with these names as one of the processes."""

    def case(function, split, dtype):
        return lambda: function(Vocabulary(split, dist.get_world_size(), dist.get_rank(), DTYPES[dtype], device))

    return results_of((name, case(*CASES[name])) for name in names)
