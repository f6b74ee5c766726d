"""Trainings with a head sharded by FSDP, for test_sharded_heads.py.

A case returns tensors by name: the loss of the whole batch, and whole gradients. Without processes, everything is
computed in one process.
"""

from contextlib import nullcontext

import torch_aclnn_ops
from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn as aclnn

import torch
import torch.distributed as dist
from host_npu.testing import results_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests._pages import blocks, run

DTYPES = {"cpu": torch.float64, "npu": torch.float32}  # HCCL cannot sum float64
ROWS, FEATURES, CLASSES = 16, 6, 21  # the classes cannot be shared evenly
# The rows of each of four processes; each of two processes has two of these.
ROWS_OF_EACH = {
    "different numbers of rows": (1, 2, 6, 7),
    "a process whose rows are all ignored": (4, 4, 4, 4),
    "a process without rows": (8, 8, 0, 0),
}


class Model(nn.Module):
    """A model whose forward pass ends before its head."""

    def __init__(self, tied=False, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, FEATURES)
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.norm(self.layer(self.embed(tokens)).tanh())


class ModelWithLoss(Model):
    """A model whose forward pass ends with the loss."""

    def forward(self, ranks, **options):
        tokens, targets, count = ranks.rows()
        hidden = super().forward(tokens)
        loss = F.linear_cross_entropy(hidden, self.head.weight, targets, reduction="sum", **options)
        return loss * _factor(ranks, count)


def _factor(ranks, count):
    """Return the factor that turns the mean over processes of sums over rows into the mean over all rows."""
    return 1 / count if ranks.is_one else ranks.size / count


class Ranks:
    """The processes that share a batch, or a single process without a rank."""

    def __init__(self, split, size, rank=None, mesh=None, device="cpu"):
        self.split, self.size, self.rank, self.mesh, self.device = split, size, rank, mesh, device
        self.is_one = rank is None

    def rows(self, step=0, rank=None):
        """Return a rank's tokens and targets of a batch, and the number of the whole batch's targets not ignored."""
        tokens, targets = torch.randint(CLASSES, (2, ROWS), generator=torch.Generator().manual_seed(100 + step))
        targets[3] = -100
        if self.split == "a process whose rows are all ignored":
            targets[ROWS // 2 :] = -100
        count = (targets != -100).sum()
        rank = self.rank if rank is None else rank
        if rank is not None:
            sizes = [sum(each) for each in torch.tensor(ROWS_OF_EACH[self.split]).chunk(self.size)]
            tokens, targets = (rows.split(sizes)[rank] for rows in (tokens, targets))
        return *(tensor.to(self.device) for tensor in (tokens, targets)), count

    def shard(self, *modules, **options):
        """Shard modules, the innermost first; a list is a group."""
        for module in () if self.is_one else modules:
            fully_shard(module, mesh=self.mesh, **options)

    def model(self, kind=Model, **options):
        """Return a model with the same weights on every process and device."""
        model = kind(**options).to(DTYPES[self.device]).to(self.device)
        if options.get("tied"):  # torch has moved the weight twice
            model.head.weight = model.embed.weight
        return model

    def mesh_of(self, *shape, **options):
        """Return a mesh of the processes."""
        return init_device_mesh(self.device, shape, **options)

    def differentiated(self, model, loss):
        """Return the mean of the processes' losses, and their gradients."""
        loss.backward()
        return self.found(model, loss)

    def found(self, model, *losses):
        """Return the mean of the processes' losses, and the gradients."""
        total = sum(loss.detach().to(DTYPES[self.device]) for loss in losses)
        if not self.is_one:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {"loss": total} | {name: _whole(one) for name, one in gradients.items() if one is not None}


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model, ranks, step=0, hidden_of=lambda hidden: hidden, **options):
    """Return a process's loss, which is computed outside of the model's forward pass."""
    tokens, targets, count = ranks.rows(step)
    options = {"reduction": "sum", "fsdp_module": model, "linear_bias": model.head.bias} | options
    loss = F.linear_cross_entropy(hidden_of(model(tokens)), model.head.weight, targets, **options)
    return loss * _factor(ranks, count)


def trained(model, ranks, **options):
    """Return the loss and the gradients of one step."""
    return ranks.differentiated(model, loss_of(model, ranks, **options))


def head_of_its_own(ranks):
    """A head that is sharded separately from the rest."""
    model = ranks.model(bias=True)
    ranks.shard(model.layer, model.head, model)
    return trained(model, ranks)


def disabled(ranks):
    """The package is disabled on all processes; the reference is computed with it."""
    with nullcontext() if ranks.is_one else torch_aclnn_ops.disabled():
        return head_of_its_own(ranks)


def head_of_the_model(ranks, tied=False, **options):
    """A head among the parameters of the outermost module."""
    model = ranks.model(tied=tied)
    ranks.shard(model.layer, model, **options)
    return trained(model, ranks)


def tied_head_freed(ranks):
    """The embedding's weight, freed after the forward pass."""
    return head_of_the_model(ranks, tied=True, reshard_after_forward=True)


def norm_and_head_in_a_group(ranks):
    """The last layers are sharded as one group, of which the forward pass runs only one."""
    model = ranks.model()
    ranks.shard(model.layer, [model.norm, model.head], model)
    return trained(model, ranks)


def other_outputs(ranks):
    """Several results, whose backward pass recomputes the logits."""
    model = ranks.model()
    ranks.shard(model.head, model, reshard_after_forward=True)
    tokens, targets, count = ranks.rows()
    options = {"reduction": "none", "outputs": ("entropy", "predicted_tokens"), "softcap": 3.0}
    result = F.linear_cross_entropy(model(tokens), model.head.weight, targets, **options, fsdp_module=model)
    return ranks.differentiated(model, (result.loss.sum() + 0.1 * result.entropy.sum()) * _factor(ranks, count))


def loss_changed_in_place(ranks):
    """A loss for each row, multiplied in place."""
    model = ranks.model()
    ranks.shard(model.head, model, reshard_after_forward=True)
    tokens, targets, count = ranks.rows()
    losses = F.linear_cross_entropy(model(tokens), model.head.weight, targets, reduction="none", fsdp_module=model)
    losses *= _factor(ranks, count)
    return ranks.differentiated(model, losses.sum())


def _with_loss_in_the_forward_pass(ranks, parts):
    model = ranks.model(ModelWithLoss)
    ranks.shard(*parts(model), model)
    return ranks.differentiated(model, model(ranks, fsdp_module=model))


def loss_in_the_forward_pass(ranks):
    """The loss is in the forward pass, where the weights are already unsharded."""
    return _with_loss_in_the_forward_pass(ranks, lambda model: [model.layer])


def group_in_the_forward_pass(ranks):
    """The loss is in the forward pass of a group."""
    return _with_loss_in_the_forward_pass(ranks, lambda model: [[model.norm, model.head]])


def _model_whose_head_is_a_loss():
    model = Model()
    model.head = aclnn.LinearCrossEntropyLoss(FEATURES, CLASSES, reduction="sum")
    return model


def module_with_the_loss(ranks):
    """A LinearCrossEntropyLoss, whose forward pass is that of its head."""
    model = ranks.model(_model_whose_head_is_a_loss)
    ranks.shard(model.head, model)
    tokens, targets, count = ranks.rows()
    return ranks.differentiated(model, model.head(model(tokens), targets) * _factor(ranks, count))


def lines_of_the_guide(ranks):
    """The code in docs/operators/linear_cross_entropy.md."""
    model = ranks.model()
    ranks.shard(model.layer, model.head, model)
    tokens, targets, count = ranks.rows()
    names = {"F": F, "model": model, "hidden": model(tokens), "targets": targets, "tokens_of_all_ranks": count}
    names["world_size"] = 1 if ranks.is_one else ranks.size
    [lines] = [block for block in blocks("docs/operators/linear_cross_entropy.md") if "fully_shard" in block.title]
    run(lines, names)
    names["loss"].backward()
    return ranks.found(model, names["loss"])


def fsdp1(ranks):
    """FullyShardedDataParallel, with the loss in the forward pass."""
    model = ranks.model(ModelWithLoss)
    if not ranks.is_one:
        model = FullyShardedDataParallel(model, device_id=torch.device(ranks.device), use_orig_params=True)
    loss = model(ranks)
    loss.backward()
    if ranks.is_one:
        return ranks.found(model, loss)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        found = {name: tensor.clone() for name, tensor in ranks.found(model, loss).items()}
    return {name.removeprefix("_fsdp_wrapped_module."): tensor for name, tensor in found.items()}


def mixed_precision(ranks):
    """Computed in bfloat16 and reduced in float32: the float32 mean of the bfloat16 gradients of all processes."""
    if ranks.is_one:
        return _mean_of_bfloat16_models(ranks)
    model = ranks.model().float()
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ranks.shard(model.head, mp_policy=MixedPrecisionPolicy(**dtypes))
    ranks.shard(model, mp_policy=MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32))
    return trained(model, ranks)


def _mean_of_bfloat16_models(ranks):
    found = []
    for rank in range(ranks.size):
        model = ranks.model().bfloat16()
        tokens, targets, count = ranks.rows(rank=rank)
        loss = F.linear_cross_entropy(model(tokens), model.head.weight, targets, reduction="sum") * (ranks.size / count)
        found.append(ranks.differentiated(model, loss))
    wide = [{name: tensor if name == "loss" else tensor.float() for name, tensor in one.items()} for one in found]
    return {name: sum(one[name] for one in wide) / ranks.size for name in wide[0]}


def hybrid(ranks):
    """Two replicas of a model that is sharded over two processes."""
    model = ranks.model()
    if not ranks.is_one:
        ranks.mesh = ranks.mesh_of(2, 2, mesh_dim_names=("replicas", "shards"))
    ranks.shard(model.head, model)
    losses = []
    for step in range(2):
        losses.append(loss_of(model, ranks, step))
        losses[-1].backward()
    return ranks.found(model, *losses)


def vocab_parallel(ranks, by_input=False):
    """A vocabulary sharded over two processes, which share a batch of their own."""
    model = ranks.model(bias=True)
    if ranks.is_one:
        return trained(model, ranks)
    mesh = ranks.mesh_of(2, 2, mesh_dim_names=("batches", "vocabulary"))
    vocabulary = mesh["vocabulary"]
    parallelize_module(model, vocabulary, {"head": ColwiseParallel()})
    ranks = Ranks(ranks.split, 2, mesh.get_local_rank("batches"), mesh["batches"], ranks.device)
    ranks.shard(model.layer, model.head, model)
    if by_input:
        return trained(model, ranks, hidden_of=lambda hidden: DTensor.from_local(hidden, vocabulary, [Replicate()]))
    return trained(model, ranks, process_group=vocabulary.get_group())


def vocab_parallel_by_the_input(ranks):
    """The same with an input that is a DTensor, instead of process_group."""
    return vocab_parallel(ranks, by_input=True)


OF_FOUR = (hybrid, vocab_parallel, vocab_parallel_by_the_input)
FUNCTIONS = (head_of_its_own, disabled, head_of_the_model, tied_head_freed, norm_and_head_in_a_group, other_outputs)
FUNCTIONS += (loss_changed_in_place, loss_in_the_forward_pass, group_in_the_forward_pass, module_with_the_loss)
FUNCTIONS += (lines_of_the_guide, fsdp1, mixed_precision)
_IN_EVERY_SPLIT = (head_of_its_own, disabled, tied_head_freed, mixed_precision, *OF_FOUR)
CASES = {
    f"{function.__name__}, {split}": (function, split)
    for function in FUNCTIONS + OF_FOUR
    for split in ROWS_OF_EACH
    if function in _IN_EVERY_SPLIT or split == "different numbers of rows"
}


def names(world_size):
    """Return the cases for this number of processes."""
    return [name for name, (function, _) in CASES.items() if world_size == 4 or function not in OF_FOUR]


def results(device, names):
    """Run the cases with these names as one of the processes."""
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def case(function, split):
        return lambda: function(Ranks(split, world_size, rank, device=device))

    return results_of((name, case(*CASES[name])) for name in names)
