"""Patched models under PEFT, accelerate and in several processes."""

import re

from torch_aclnn_ops.integrations.transformers import patch_model, unpatch_model

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from host_npu.testing import run
from torch.nn.parallel import DistributedDataParallel

from tests import _transformers_distributed as trainings
from tests._distributed import DEVICES
from tests._language_models import CHUNK, LOGITS, Step, assert_close, assert_patched, make
from tests.test_transformers_adapters import CASES, adapted


def _patch(model):
    return patch_model(model, chunk_size=CHUNK)


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
    # Outputs of mixed precision are made float32, the logits not computed for that.
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
    """What the first of two processes has found."""
    return run(trainings.results, trainings.PROCESSES, device=request.param)[0]


@pytest.mark.parametrize("training", trainings.TRAININGS)
@pytest.mark.every_nth_case(3)
def test_several_processes_find_the_gradients_of_one(found, training):
    assert not isinstance(found[training], str), found[training]
    model = make("gemma2" if "tied" in training else "mixtral" if "experts" in training else "llama")
    total = sum(Step(model, **trainings.share(rank)).loss for rank in range(trainings.PROCESSES))
    model.zero_grad()
    for rank in range(trainings.PROCESSES):
        (model(**trainings.share(rank)).loss / trainings.PROCESSES).backward()
    tolerance = 5e-2 if "16 bits" in training else 2e-5
    loss, largest, gradients = found[training]
    torch.testing.assert_close(loss, total / trainings.PROCESSES, rtol=tolerance, atol=0)
    assert largest < LOGITS / trainings.PROCESSES
    for name, wanted in model.named_parameters():
        error = (gradients[name] - wanted.grad).abs().max()
        assert error <= tolerance * wanted.grad.abs().max(), name


SENTENCES = {
    "norm and head": "sharded the head together with other modules.*reshard_after_forward=False",
    "a head in FSDP1": "the head's weights are still sharded.*FSDP1, ZeRO-3",
    "a head with adapters by itself": "head with adapters.*shard such a head together with the rest",
    "DistributedDataParallel": "but it is a DistributedDataParallel; call it before",
}


@pytest.mark.parametrize("wrapper", SENTENCES)
def test_a_wrapper_with_sharded_weights_raises_with_a_remedy(found, wrapper):
    assert re.search(SENTENCES[wrapper], found[wrapper])


@pytest.fixture
def group_of_one():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_loss_outside_of_ddps_static_graph_raises_because_ddp_would_not_average_its_gradients(group_of_one):
    model = DistributedDataParallel(patch_model(make()), static_graph=True)
    inputs = trainings.share(0)
    model(**inputs).loss.backward()
    logits = model(**inputs).logits
    for use in (lambda: torch.nn.functional.cross_entropy(logits[0], inputs["labels"][0]), logits.materialize):
        with pytest.raises(RuntimeError, match="pass labels to the model, static_graph=False, or call unpatch_model"):
            use()
