"""The Trainer of transformers with EmaCallback, for adapters of PEFT."""

import peft
import pytest
import torch
from safetensors.torch import load_file

from tests._language_models import make
from tests.test_hf_trainer import make_trainer

STEPS = 4
CONFIGS = {
    "LoRA": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "LoRA and the head": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    ),
    "prompts": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}
each_kind = pytest.mark.parametrize("kind", CONFIGS)


def adapted(kind):
    torch.manual_seed(0)
    return peft.get_peft_model(make(), CONFIGS[kind]())


def trainer_of(kind, folder, **arguments):
    steps = {"max_steps": STEPS, "save_steps": STEPS // 2, "eval_strategy": "no"}
    return make_trainer(folder, adapted(kind), **{**steps, **arguments})


def trained(model):
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


def assert_same(found, expected):
    assert found.keys() == expected.keys() and found
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name], rtol=0, atol=0, msg=name)


@each_kind
def test_training_resumes_with_the_trained_adapter(kind, tmp_path):
    whole = trainer_of(kind, tmp_path)
    whole.train()
    resumed = trainer_of(kind, tmp_path)
    resumed.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{STEPS // 2}")
    assert_same(trained(resumed.model), trained(whole.model))
    averages = ({id(p): s["ema_params"] for p, s in one.optimizer.optimizer.state.items()} for one in (resumed, whole))
    for found, expected in zip(*(one.values() for one in averages), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_kind
def test_a_checkpoint_has_the_adapter_with_ema_weights(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path)
    trainer.train()
    saved = load_file(f"{tmp_path}/checkpoint-{STEPS}/ema/adapter/adapter_model.safetensors")
    weights = peft.get_peft_model_state_dict(trainer.model)
    assert any(not torch.equal(one, weights[name]) for name, one in saved.items())
    with trainer.optimizer.optimizer.swap_ema_params():
        assert_same(saved, peft.get_peft_model_state_dict(trainer.model))


@each_kind
def test_the_best_model_has_the_adapter_that_was_evaluated(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=STEPS // 2)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
