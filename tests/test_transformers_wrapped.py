"""Patched models with every kind of adapter of PEFT, under accelerate and in several processes."""

import re
import warnings
from copy import deepcopy
from functools import partial
from typing import NamedTuple

from torch_aclnn_ops.integrations.transformers import patch_model, unpatch_model

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from host_npu.testing import results_of, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests._distributed import DEVICES
from tests._language_models import (
    CHUNK,
    LOGITS,
    PROCESSES,
    Step,
    WithOwnLoss,
    assert_close,
    assert_patched,
    make,
    share,
)
from tests._modes import Largest

ON_HEAD = {"target_modules": ["lm_head", "q_proj"]}
LATE = "its head was replaced or got adapters after patch_model"
UNCALLED = "was not called as a linear layer"


class Case(NamedTuple):
    """An adapter, the warning if the loss needs logits, also if the patch came first, and the model."""

    config: peft.PeftConfig
    warning: str = ""
    warning_after: str | None = None
    is_tied: bool = False
    family: str = "llama"


CASES = {
    "LoRA": Case(peft.LoraConfig(**ON_HEAD, r=4, lora_alpha=6), "", LATE),
    "LoRA, a softcap": Case(peft.LoraConfig(**ON_HEAD, r=4), "", LATE, family="gemma2"),
    "LoRA, a bias": Case(peft.LoraConfig(**ON_HEAD, r=4), "", LATE, family="phi"),
    "LoRA with dropout": Case(peft.LoraConfig(**ON_HEAD, r=4, lora_dropout=0.3), "", LATE),
    "LoRA, scaled by the rank's root": Case(peft.LoraConfig(**ON_HEAD, r=4, use_rslora=True), "", LATE),
    "LoRA on the head alone": Case(peft.LoraConfig(target_modules=["lm_head"], r=4), "", LATE),
    "LoRA elsewhere": Case(peft.LoraConfig(target_modules=["q_proj"], r=4)),
    "BOFT": Case(peft.BOFTConfig(**ON_HEAD, boft_block_size=4), "mul needs them"),
    "OFT": Case(peft.OFTConfig(**ON_HEAD, oft_block_size=4, r=0)),
    "LoHa": Case(peft.LoHaConfig(**ON_HEAD, r=4), "add needs them"),
    "LoKr": Case(peft.LoKrConfig(**ON_HEAD, r=4), "add needs them"),
    "VeRA": Case(peft.VeraConfig(target_modules=["lm_head"], r=4), "add needs them"),
    "AdaLoRA": Case(peft.AdaLoraConfig(**ON_HEAD, total_step=10), "add_ materializes the logits"),
    "DoRA": Case(peft.LoraConfig(**ON_HEAD, r=4, use_dora=True), "T needs them", LATE),
    "prompt tuning": Case(peft.PromptTuningConfig(num_virtual_tokens=4)),
    "prefix tuning": Case(peft.PrefixTuningConfig(num_virtual_tokens=4)),
    "the head saved": Case(peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "", LATE),
    "trainable tokens": Case(peft.TrainableTokensConfig(token_indices=[3, 4])),
    "trainable tokens of a tied head": Case(peft.TrainableTokensConfig(token_indices=[3, 4]), UNCALLED, is_tied=True),
    "LoRA with trainable tokens of a tied head": Case(
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]), UNCALLED, is_tied=True
    ),
}


@pytest.fixture(autouse=True)
def _extensions_of_this_process(monkeypatch, tmp_path_factory):
    """Give BOFT a new folder for its extension; in torch's, the lock of a killed process would block it forever."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.getbasetemp() / "extensions"))


def _patch(model):
    return patch_model(model, chunk_size=CHUNK)


def adapted(case, patch=lambda model: model):
    torch.manual_seed(5)
    config = deepcopy(case.config)
    config.task_type = "CAUSAL_LM"
    model = peft.get_peft_model(patch(make(case.family, tie_word_embeddings=case.is_tied)), config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # some are initialized to zero
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


@pytest.mark.parametrize("is_patched_first", [False, True], ids=["adapted, patched", "patched, adapted"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_adapted_model_has_the_same_loss_without_logits_or_one_warning(case, is_patched_first):
    expected = Step(adapted(case))
    model = adapted(case, _patch) if is_patched_first else _patch(adapted(case))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        steps = [Step(model), Step(model)]
    for step in steps:
        assert_close(step, expected)
    says = case.warning_after if is_patched_first and case.warning_after is not None else case.warning
    told = [str(one.message) for one in warned if "patch_model" in str(one.message)]
    assert len(told) == (1 if says else 0) and all(says in one for one in told)
    assert says or steps[0].largest < LOGITS


def _own_loss(wrap):
    return lambda mesh: WithOwnLoss(wrap(mesh))


def _ddp(**options):
    return lambda mesh: DistributedDataParallel(_patched(mesh), **options)


def _make(mesh, family="llama"):
    # On a device, experts count rows with an integer histogram, which the host NPU does not have.
    return make(family, experts_implementation="eager").to(mesh.device_type)


def _patched(mesh, family="llama"):
    return patch_model(_make(mesh, family), chunk_size=CHUNK, lazy_without_labels=True)


def _fully_sharded(groups=lambda model: [], family="llama", patched="first", **options):
    def shard(mesh):
        model = _patched(mesh, family) if patched == "first" else _make(mesh, family)
        for group in (*model.model.layers, *groups(model), model):
            fully_shard(group, mesh=mesh, **options)
        return model if patched == "never" else patch_model(model, chunk_size=CHUNK)

    return shard


def _head(model):
    return [model.lm_head]


def _norm_and_head(model):
    return [[model.model.norm, model.lm_head]]


POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
TRAININGS = {
    "DDP": _ddp(),
    "DDP that looks for unused parameters": _ddp(find_unused_parameters=True),
    "DDP with a static graph": _ddp(static_graph=True),
    "FSDP2": _fully_sharded(),
    "FSDP2, patched last": _fully_sharded(patched="last"),
    "FSDP2, tied": _fully_sharded(family="gemma2"),
    "FSDP2, the head by itself": _fully_sharded(_head, reshard_after_forward=True),
    "FSDP2, the head by itself, not resharded": _fully_sharded(_head, reshard_after_forward=False),
    "FSDP2, experts, the head by itself": _fully_sharded(_head, family="mixtral", reshard_after_forward=True),
    "FSDP2, norm and head, not resharded": _fully_sharded(_norm_and_head, reshard_after_forward=False),
    "DDP, a loss of its own": _own_loss(_ddp()),
    "FSDP2, 16 bits": _fully_sharded(_head, mp_policy=POLICY),
}
# Compared with FSDP2, because the layers of one process would round other numbers.
IN_16_BITS = {"FSDP2, 16 bits, not patched": _fully_sharded(_head, patched="never", mp_policy=POLICY)}


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _train(wrap, mesh):
    """Return the mean of the losses, the number of elements of the largest tensor, and the gradients."""
    model = wrap(mesh)
    for _ in range(2):  # leftovers of the first step would show in the second
        model.zero_grad()
        with Largest() as largest:
            loss = model(**share(mesh.get_rank(), mesh.device_type))["loss"]
            loss.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    prefix = "model.module." if isinstance(model, WithOwnLoss) else "module."
    gradients = {name.removeprefix(prefix): _whole(one.grad) for name, one in model.named_parameters()}
    return loss / PROCESSES, largest.elements, gradients


def _resharded_group(mesh):
    _fully_sharded(_norm_and_head)(mesh)(**share(mesh.get_rank(), mesh.device_type))


def _fsdp1_head(mesh):
    model, device = _patched(mesh), torch.device(mesh.device_type)
    model.lm_head = FullyShardedDataParallel(model.lm_head, device_id=device)
    FullyShardedDataParallel(model, device_id=device)(**share(mesh.get_rank(), mesh.device_type))


def _adapted_head(mesh):
    model = peft.get_peft_model(_make(mesh), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    for module in (model.base_model.model.lm_head, model):
        fully_shard(module, mesh=mesh)
    patch_model(model)(**share(mesh.get_rank(), mesh.device_type))


REFUSALS = {
    "norm and head": _resharded_group,
    "a head in FSDP1": _fsdp1_head,
    "a head with adapters by itself": _adapted_head,
}


def results(device):
    """Do every training in turn, and every refused call."""
    mesh = init_device_mesh(device, (PROCESSES,))
    trainings = ((name, partial(_train, wrap, mesh)) for name, wrap in (TRAININGS | IN_16_BITS).items())
    refusals = ((name, partial(call, mesh)) for name, call in REFUSALS.items())
    return results_of(trainings) | results_of(refusals)


def _disabled(model):
    model.base_model.disable_adapter_layers()
    model.get_base_model().lm_head.requires_grad_(True)


def _two(model):
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


STATES = {"disabled": _disabled, "merged": lambda model: model.merge_adapter(), "two at once": _two}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_the_adapters_that_are_active_are_in_the_loss(change):
    model = adapted(CASES["LoRA"])
    change(model)
    model.get_base_model().get_input_embeddings().weight.requires_grad_(True)
    assert_patched(model, _patch)


@pytest.fixture
def another_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("another_accelerator")
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_prepares_a_patched_model(mixed_precision):
    # Mixed precision converts outputs to float32, which must not compute the logits.
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model, expected = make(), Step(accelerator.prepare(make()))
    step = Step(accelerator.prepare(_patch(model)))
    assert step.largest < LOGITS and not step.output.logits.is_materialized
    assert_close(step, expected, 2e-5 if mixed_precision == "no" else 3e-2)
    unpatch_model(accelerator.unwrap_model(model))
    assert "forward" not in vars(model.lm_head)


@pytest.fixture(
    scope="module",
    params=["cpu", *(pytest.param(device, marks=pytest.mark.exhaustive) for device in DEVICES if device != "cpu")],
)
def found(request):
    """Return the results of the first of two processes."""
    return run(results, PROCESSES, device=request.param)[0]


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.every_nth_case(3)
def test_several_processes_find_the_gradients_of_one(found, training):
    assert not isinstance(found[training], str), found[training]
    loss, largest, gradients = found[training]
    if "16 bits" in training:
        (name,) = IN_16_BITS
        wanted_loss, _, wanted = found[name]
    else:
        model = make("gemma2" if "tied" in training else "mixtral" if "experts" in training else "llama")
        wanted_loss = sum(Step(model, **share(rank)).loss for rank in range(PROCESSES)) / PROCESSES
        model.zero_grad()
        for rank in range(PROCESSES):
            (model(**share(rank)).loss / PROCESSES).backward()
        wanted = {name: one.grad for name, one in model.named_parameters()}
    tolerance = 2.5e-2 if "16 bits" in training else 2e-5
    torch.testing.assert_close(loss, wanted_loss, rtol=tolerance, atol=0)
    assert largest < LOGITS / PROCESSES
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= tolerance * gradient.abs().max(), name


SENTENCES = {
    "norm and head": "sharded the head together with other modules.*reshard_after_forward=False",
    "a head in FSDP1": "the head's weights are still sharded.*FSDP1, ZeRO-3",
    "a head with adapters by itself": "head with adapters.*shard such a head together with the rest",
}


@pytest.mark.parametrize("wrapper", SENTENCES)
def test_a_wrapper_with_sharded_weights_raises_with_a_remedy(found, wrapper):
    assert re.search(SENTENCES[wrapper], found[wrapper])


def test_a_loss_outside_of_ddps_static_graph_raises_because_ddp_would_not_average_its_gradients(mesh_of_one):
    model = DistributedDataParallel(patch_model(make()), static_graph=True)
    inputs = share(0)
    model(**inputs).loss.backward()
    logits = model(**inputs).logits
    for use in (lambda: torch.nn.functional.cross_entropy(logits[0], inputs["labels"][0]), logits.materialize):
        with pytest.raises(RuntimeError, match="pass labels to the model, static_graph=False, or call unpatch_model"):
            use()
