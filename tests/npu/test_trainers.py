"""Patched language models on an NPU, the trainers of transformers, TRL and Lightning, and files of other libraries."""

import importlib
from functools import partial
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops.integrations.transformers import patch_model
from torch_aclnn_ops.optim import FusedEmaAdam, unwrap

import peft
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from safetensors.torch import load_file, load_model, save_model

from tests._language_models import CHUNK, LOGITS, LOSSES, WithOwnLoss, assert_patched, batch, make
from tests._modes import Largest
from tests._optim import each_flatten
from tests._trl import fused, patched
from tests.test_hf_trainer import make_trainer
from tests.test_lightning import Clipped, Model, averages_of, equal, fit
from tests.test_lightning import make_trainer as make_lightning_trainer

CROSS_ENTROPY = {"aclnnFusedLinearOnlineMaxSum", "aclnnFusedLinearCrossEntropyLossGrad"}


@pytest.fixture
def launched():
    """Return a function that returns the operators launched since the start of the test."""
    before = torch_aclnn_ops.launches()
    return lambda: {name for name, count in torch_aclnn_ops.launches().items() if count > before.get(name, 0)}


def _evaluations(trainer):
    return [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("npu"), use_cpu=False)
    trainer.train()
    return trainer


def test_transformers_trains_and_evaluates_averages_on_it_as_on_a_cpu(trained, tmp_path):
    on_cpu = make_trainer(tmp_path)
    on_cpu.train()
    assert trained.model.device.type == "npu"
    assert trained.losses == pytest.approx(on_cpu.losses, rel=1e-3)
    assert _evaluations(trained) == pytest.approx(_evaluations(on_cpu), rel=1e-3)


@pytest.mark.exhaustive
def test_transformers_resumes_from_a_checkpoint_on_it_with_the_same_losses_and_averages(trained):
    resumed = make_trainer(trained.args.output_dir, use_cpu=False, save_strategy="no")
    resumed.train(resume_from_checkpoint=f"{trained.args.output_dir}/checkpoint-3")
    assert resumed.losses == trained.losses[3:]
    assert _evaluations(resumed) == _evaluations(trained)


def test_transformers_with_bf16_launches_the_fused_operators(tmp_path, launched):
    settings = {"bf16": True, "max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    make_trainer(tmp_path, patch_model(make()), use_cpu=False, **settings).train()
    assert {"aclnnApplyFusedEmaAdam"} | CROSS_ENTROPY <= launched()


def _head_of_trl(model, device):
    inputs = {name: one.to(device) for name, one in batch().items()}
    return model.to(device)(**inputs, fused_lm_head=True)


def test_the_head_of_trl_finds_on_it_what_that_of_a_cpu_finds():
    model, on_cpu = patched(fused(make()), chunk_size="auto"), fused(make())
    found, expected = _head_of_trl(model, "npu"), _head_of_trl(on_cpu, "cpu")
    for name, one in expected.items():
        torch.testing.assert_close(found[name].cpu(), one, rtol=2e-5, atol=2e-5)
    for output in (found, expected):
        (output.log_probs.sum() + output.entropy.sum()).backward()
    for parameter, wanted in zip(model.parameters(), on_cpu.parameters(), strict=True):
        assert (parameter.grad.cpu() - wanted.grad).abs().max() <= 2e-5 * wanted.grad.abs().max()


def test_log_probabilities_of_a_16_bit_head_of_trl_launch_the_fused_operators(launched):
    model = patched(fused(make().bfloat16(), outputs=("log_probs",)), chunk_size="auto")
    _head_of_trl(model, "npu").log_probs.sum().backward()
    assert launched() >= CROSS_ENTROPY


@pytest.fixture
def place(monkeypatch):
    """The arguments with which the example configures Lightning's trainer for an NPU."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return {"accelerator": "auto", **importlib.import_module("lightning_digits").place(torch.device("npu"))}


def test_lightning_trains_and_validates_averages_on_it_as_on_a_cpu(place, launched):
    trainer, on_cpu = make_lightning_trainer(**place), make_lightning_trainer()
    model, expected = fit(trainer, Model()), fit(on_cpu, Model())
    assert {one.device.type for one in model.seen[-1].values()} == {"npu"}
    assert equal(model.seen[-1], {name: one.npu() for name, one in averages_of(trainer, model).items()})
    assert model.losses == pytest.approx(expected.losses, rel=1e-4)
    for name, average in averages_of(on_cpu, expected).items():
        torch.testing.assert_close(model.seen[-1][name].cpu(), average, rtol=1e-4, atol=1e-6)
    assert "aclnnApplyFusedEmaAdam" in launched()


@pytest.mark.exhaustive
@pytest.mark.parametrize("goes_on", ["npu", "cpu"])
def test_lightning_resumes_from_a_checkpoint_of_it(goes_on, place, tmp_path):
    whole = fit(make_lightning_trainer(epochs=4, **place), Model())
    fit(make_lightning_trainer(ModelCheckpoint(tmp_path, "model"), **place), Model())
    trainer = make_lightning_trainer(epochs=4, **(place if goes_on == "npu" else {}))
    resumed = fit(trainer, Model(), ckpt_path=tmp_path / "model.ckpt")
    assert resumed.losses == pytest.approx(whole.losses[len(resumed.losses) :], rel=1e-4)
    assert 2 * len(resumed.losses) == len(whole.losses)


def test_lightning_clips_gradients_that_it_has_scaled_on_it(place):
    trainer = make_lightning_trainer(plugins=MixedPrecision("16-mixed", device="npu"), gradient_clip_val=0.01, **place)
    model = fit(trainer, Clipped())
    assert model.norms and max(model.norms) == pytest.approx(0.01, rel=1e-3)


class InAutocast(Model):
    """Records the dtype in which its layers compute."""

    def loss(self, rows):
        self.dtype_seen = self.layers[0](rows).dtype
        return super().loss(rows)


def test_lightning_computes_in_bfloat16_with_a_plugin_that_names_the_device(place):
    plugin = MixedPrecision("bf16-mixed", device="npu")
    assert fit(make_lightning_trainer(plugins=plugin, **place), InAutocast()).dtype_seen == torch.bfloat16


def _model_and_optimizer(flatten, device="npu"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)
    return model, FusedEmaAdam(model.parameters(), lr=0.1, ema_decay=0.5, flatten=flatten)


def _step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 64, device="npu")).square().mean().backward()
    optimizer.step()


def _copies(tensors):
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


@each_flatten
def test_accelerate_saves_and_loads_every_parameter(flatten, tmp_path):
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*_model_and_optimizer(flatten, "cpu"))
    assert next(model.parameters()).device.type == "npu"
    _step(model, optimizer)
    weights = _copies(model.state_dict())
    averages = _copies(unwrap(optimizer).ema_state_dict(model))
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "weights")
    with unwrap(optimizer).swap_ema_params():
        accelerator.save_model(model, tmp_path / "averages")
    _step(model, optimizer)
    accelerator.load_state(tmp_path / "state")
    assert equal(_copies(model.state_dict()), weights)
    assert equal(load_file(tmp_path / "weights" / "model.safetensors"), weights)
    assert equal(load_file(tmp_path / "averages" / "model.safetensors"), averages)


@each_flatten
def test_safetensors_saves_and_loads_every_parameter(flatten, tmp_path):
    model, optimizer = _model_and_optimizer(flatten)
    _step(model, optimizer)
    weights = _copies(model.state_dict())
    save_model(model, tmp_path / "model.safetensors")
    _step(model, optimizer)
    load_model(model, tmp_path / "model.safetensors", device="npu:0")
    assert equal(_copies(model.state_dict()), weights)


EAGER = {"attn_implementation": "eager"}


@pytest.fixture
def call():
    return {name: one.npu() for name, one in batch().items()}


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "granite"])
def test_loss_and_every_gradient_are_those_of_the_model_as_it_was(family, call):
    assert_patched(make(family, **EAGER).npu(), partial(patch_model, chunk_size=CHUNK), 1e-4, **call)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_evaluation_without_logits_has_the_loss_of_the_model_as_it_was(family, call):
    model = make(family, **EAGER).npu().eval()
    with torch.no_grad():
        expected = model(**call).loss
        with Largest() as largest:
            output = patch_model(model, chunk_size=CHUNK, eval_logits=False)(**call)
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=0)
    assert output.logits is None and largest.elements < LOGITS


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_outside_of_the_forward_pass_is_that_of_the_model_as_it_was(loss, call):
    def patch(model):
        patch_model(model.model, chunk_size=CHUNK, lazy_without_labels=True)

    assert_patched(WithOwnLoss(make("gemma2", **EAGER).npu(), loss), patch, 1e-4, **call)


def test_adapters_of_a_frozen_head_are_in_the_loss(call):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(make("phi", **EAGER), config).npu()
    assert_patched(model, partial(patch_model, chunk_size=CHUNK), 1e-4, **call)


def test_a_16_bit_head_takes_the_fused_operators(call, launched):
    patch_model(make(**EAGER).to(torch.bfloat16).npu())(**call).loss.backward()
    assert launched() >= CROSS_ENTROPY
