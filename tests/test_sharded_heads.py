"""linear_cross_entropy with a head sharded by FSDP over 2 and 4 processes: the loss and gradients of one process."""

from functools import cache

from torch_aclnn_ops import functional as F

import pytest
import torch
from host_npu.testing import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests import _sharded_heads as cases
from tests._distributed import groups, selected

_RUNS = [
    pytest.param(group, name, marks=marks)
    for (group,), marks, _ in groups(2, 4, often={("npu", 2), ("cpu", 4)})
    for name in cases.names(world_size=group[1])
]
# Relative to the number, and to the tensor's largest one.
TOLERANCES = {"cpu": (1e-12, 1e-12), "npu": (1e-5, 1e-5)}
# A CPU computes the same. An NPU rounds logits, their gradient and both products to bfloat16 where the CPU does not, or
# does later: four roundings of at most 2**-9 on each side are 2**-6 of a number. If terms cancel, the largest one
# matters: rounding a term on each side is 2**-8 of it.
TOLERANCES_IN_BFLOAT16 = {"cpu": (1e-6, 1e-6), "npu": (2**-6, 2**-8)}


@pytest.fixture(scope="module")
def found(request):
    """Return a function that returns the results of this number of processes, by rank."""

    @cache
    def of_group(group):
        device, world_size = group
        return run(cases.results, world_size, selected(request, "name", group=group), device=device)

    return of_group


@pytest.mark.parametrize(("group", "name"), _RUNS, ids=str)
@pytest.mark.every_nth_case(4)
def test_loss_and_gradients_equal_one_process_with_the_full_batch(found, group, name):
    device, world_size = group
    function, split = cases.CASES[name]
    truth = function(cases.Ranks(split, world_size))
    relative, absolute = TOLERANCES[device]
    if function is cases.mixed_precision:
        relative, absolute = TOLERANCES_IN_BFLOAT16[device]
    for of_rank in found(group):
        assert not isinstance(of_rank[name], str), of_rank[name]
        assert of_rank[name].keys() == truth.keys()
        for key, expected in truth.items():
            assert expected.isfinite().all()
            mine = of_rank[name][key].to(expected.dtype)
            largest = float(expected.abs().max())
            torch.testing.assert_close(mine, expected, rtol=relative, atol=absolute * largest)


def _call(model, linear_weight, **options):
    tokens, targets = torch.tensor([1, 2]), torch.tensor([2, 3])
    return F.linear_cross_entropy(model(tokens), linear_weight, targets, **options)


@pytest.mark.parametrize(
    "shape, sentence",
    [
        ((2,), "pass the model that owns it as fsdp_module"),
        ((1, 2), r"on a mesh of shape \(1, 2\); if it is sharded by fully_shard"),
    ],
)
def test_a_head_sharded_by_fsdp2_raises_without_fsdp_module(group_of_two, shape, sentence):
    model = cases.Model()
    fully_shard(model.head, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)]))
    with pytest.raises(ValueError, match=sentence):
        _call(model, model.head.weight)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_every_rank_checks_max_memory_for_the_largest_shard(group_of_two, requires_grad):
    head = torch.rand(2, cases.FEATURES, requires_grad=requires_grad)
    options = {"process_group": group_of_two, "vocab_sizes": (2, 60000), "max_memory": 100_000}
    with pytest.raises(ValueError, match="max_memory must be at least [0-9]{6} bytes"):
        F.linear_cross_entropy(torch.rand(4, cases.FEATURES), head, torch.zeros(4).long(), **options)


def test_fsdp_module_is_a_no_op_for_an_unsharded_model():
    model = cases.Model()
    assert torch.equal(_call(model, model.head.weight, fsdp_module=model), _call(model, model.head.weight))


def test_the_module_must_be_one_that_has_the_head():
    model = cases.Model()
    with pytest.raises(TypeError, match="fsdp_module must be None or a torch.nn.Module, but it is True"):
        _call(model, model.head.weight, fsdp_module=True)
    sentence = "linear_weight must currently be a parameter of fsdp_module.* none of the 2 parameters of this Linear"
    with pytest.raises(ValueError, match=sentence):
        _call(model, model.head.weight, fsdp_module=model.layer)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_head_sharded_by_fsdp1_raises_with_fsdp_module(group_of_two, use_orig_params):
    model = FullyShardedDataParallel(cases.Model(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    sentence = r"FullyShardedDataParallel \(FSDP1\) unshards weights in its forward pass"
    with pytest.raises(TypeError, match=f"fsdp_module must be a module that fully_shard has sharded; {sentence}"):
        F.linear_cross_entropy(torch.ones(2, 6), next(model.parameters()), torch.tensor([2, 3]), fsdp_module=model)


def test_the_flat_shard_of_an_fsdp1_head_raises_with_a_remedy(group_of_two):
    model = cases.Model()
    model.head = FullyShardedDataParallel(model.head, device_id=torch.device("cpu"), use_orig_params=True)
    sentence = r"linear_weight must have shape \(C, 6\).* FullyShardedDataParallel \(FSDP1\) unshards weights in its"
    with pytest.raises(RuntimeError, match=sentence):
        _call(model, model.head.weight)
