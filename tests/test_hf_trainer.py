"""The Trainer of transformers with FusedEmaAdam and EmaCallback, for models and for adapters of PEFT."""

import math
import re
import warnings

from torch_aclnn_ops import disabled
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations._trainers import warn_of_initial_weights
from torch_aclnn_ops.integrations.transformers import EmaCallback, ReportCallback, patch_model
from torch_aclnn_ops.optim import FusedEmaAdam

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from tests._language_models import CHUNK, batch, make

STEPS = 6


def _rows():
    batches = [batch(seed) for seed in range(STEPS)]
    return [{name: one[row] for name, one in each.items()} for each in batches for row in range(2)]


class Recorded(Trainer):
    """A trainer that records the losses of its training steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses = []

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def make_trainer(folder, model=None, average=True, optimizer=FusedEmaAdam, callbacks=(), **arguments):
    kwargs = {"lr": 1e-2, "ema_decay": 0.9} if optimizer is FusedEmaAdam else {"lr": 1e-2}
    steps = {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 3}
    arguments = {"use_cpu": True, **steps, **arguments}
    trainer = Recorded(
        patch_model(make(), chunk_size=CHUNK) if model is None else model,
        TrainingArguments(str(folder), per_device_train_batch_size=2, report_to=[], disable_tqdm=True, **arguments),
        callbacks=list(callbacks),
        train_dataset=_rows(),
        eval_dataset=_rows()[:4],
        optimizer_cls_and_kwargs=(optimizer, kwargs),
    )
    if average:
        trainer.add_callback(EmaCallback(trainer))
    return trainer


def train(*args, **arguments):
    """Return a trainer after its training."""
    trainer = make_trainer(*args, **arguments)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"))


def test_training_equals_that_of_an_unpatched_model(trained, tmp_path):
    other = train(tmp_path, make(), average=False)
    assert trained.losses == pytest.approx(other.losses, rel=1e-4)


def test_evaluation_uses_the_averages_and_restores_the_weights(trained):
    model, optimizer = trained.model, trained.optimizer.optimizer
    weights = [weight.detach().clone() for weight in model.parameters()]
    found = trained.evaluate()["eval_loss"]
    assert all(map(torch.equal, model.parameters(), weights))
    averaged = make()
    averaged.load_state_dict(optimizer.ema_state_dict(model))
    rows = [{name: one[None] for name, one in row.items()} for row in trained.eval_dataset]
    losses = [averaged.eval()(**row).loss.item() for row in rows]
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-3)
    assert [log["eval_loss"] for log in trained.state.log_history if "eval_loss" in log][STEPS // 2 - 1] == found


def test_the_dtype_is_restored_after_an_evaluation_in_16_bits(tmp_path):
    model = make()
    model.get_input_embeddings().requires_grad_(False)
    trainer = train(tmp_path, model, eval_strategy="no", save_strategy="no", bf16_full_eval=True)
    before = [weight.detach().clone() for weight in model.parameters()]
    trainer.evaluate()
    assert all(map(torch.equal, model.parameters(), before))
    trainer.train()


def test_weights_are_restored_if_an_evaluation_fails(trained):
    weights = [weight.detach().clone() for weight in trained.model.parameters()]
    with pytest.raises(TypeError):
        trained.evaluate([object()])
    assert all(map(torch.equal, trained.model.parameters(), weights))
    trained.optimizer.state_dict()  # raises while the model holds its averages


def test_a_checkpoint_has_the_model_with_averaged_weights(trained):
    folder = f"{trained.args.output_dir}/checkpoint-{STEPS}"
    averaged = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/ema").state_dict()
    expected = trained.optimizer.optimizer.ema_state_dict(trained.model)
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(weights[name], weight)
        assert torch.equal(averaged[name], expected[name])
    assert not torch.equal(averaged["lm_head.weight"], weights["lm_head.weight"])


def test_training_that_resumes_without_the_averages_is_warned_of(tmp_path):
    make_trainer(tmp_path, max_steps=2, save_steps=2, save_only_model=True).train()
    resumed = make_trainer(tmp_path, max_steps=3)
    with pytest.warns(UserWarning, match="resumes at step 2 from a checkpoint without the optimizer's state"):
        resumed.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")


def test_gradient_accumulation_normalizes_by_the_labels_of_all_micro_batches(tmp_path):
    losses = []
    for model in (make(), patch_model(make(), chunk_size=CHUNK)):
        trainer = train(tmp_path / str(len(losses)), model, gradient_accumulation_steps=3, max_steps=2)
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log] + trainer.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and all(map(math.isfinite, losses[0]))


def test_label_smoothing_of_the_trainer_gets_real_logits_and_one_warning(tmp_path):
    losses, told = [], []
    for model in (make(), patch_model(make(), chunk_size=CHUNK)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = train(tmp_path / str(len(losses)), model, label_smoothing_factor=0.1, max_steps=2)
        losses.append(trainer.losses)
        told.append(sum("called in training without labels" in str(one.message) for one in caught))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and told == [0, 1]


def test_predictions_are_real_logits(trained):
    predictions = trained.predict(trained.eval_dataset).predictions
    assert not isinstance(predictions, LazyLogits) and predictions.shape == (4, 64, 512)


def test_another_optimizer_raises(tmp_path):
    with pytest.raises(ValueError, match="must be a FusedEmaAdam, but it is a SGD"):
        make_trainer(tmp_path, optimizer=torch.optim.SGD).train()


def test_a_callback_of_another_trainer_raises(tmp_path):
    other = make_trainer(tmp_path, average=False)
    trainer = make_trainer(tmp_path, average=False, callbacks=[EmaCallback(other)])
    with pytest.raises(RuntimeError, match="the callback is used by another trainer; create one for each trainer"):
        trainer.train()


@pytest.mark.parametrize(("given", "found"), [(("gpt2",), "'gpt2'"), ((), "None")])
def test_another_argument_than_a_trainer_raises_with_the_line_to_write(given, found):
    sentence = f"but it is {found}; call trainer.add_callback(EmaCallback(trainer)) after"
    with pytest.raises(TypeError, match=f"^EmaCallback: trainer must be a transformers.Trainer, {re.escape(sentence)}"):
        EmaCallback(*given)


def test_the_averages_are_in_the_checkpoints_of_a_hyperparameter_search(tmp_path):
    trainer = make_trainer(tmp_path, load_best_model_at_end=True, save_steps=2)
    trainer._get_output_dir = lambda trial: str(tmp_path / "run-7")  # as in the seventh trial
    trainer.train()
    assert [path.parent.parent.name for path in tmp_path.glob("**/ema")] == ["run-7"] * (STEPS // 2)
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


def test_sharded_trainers_cannot_load_the_best_averages(tmp_path):
    trainer = make_trainer(tmp_path, load_best_model_at_end=True, save_steps=2)
    trainer.create_optimizer()
    trainer.is_fsdp_enabled = True
    [callback] = [one for one in trainer.callback_handler.callbacks if isinstance(one, EmaCallback)]
    with pytest.raises(ValueError, match=r"load the folder 'ema' of trainer\.state\.best_model_checkpoint"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)


@pytest.mark.parametrize("steps", [2, 100])
def test_a_report_counts_the_first_steps(steps, tmp_path, caplog):
    callback = ReportCallback(steps)
    with caplog.at_level("INFO", "torch_aclnn_ops"):
        make_trainer(tmp_path, average=False, callbacks=[callback], eval_strategy="no").train()
    counts = callback.report.as_dict()["operators"]["linear_cross_entropy"]
    assert counts["calls"] == min(steps, STEPS)
    assert any(str(callback.report) in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("steps", [0, 1.5, True])
def test_a_report_of_no_steps_raises(steps):
    with pytest.raises(ValueError, match="ReportCallback: steps must be an int of at least 1, but it is"):
        ReportCallback(steps)


@pytest.mark.parametrize(
    ("options", "steps", "share"),
    [
        ({"ema_decay": 0.9999}, 40, "99.6%"),
        ({"ema_decay": 0.99, "ema_update_every": 10}, 400, "66.9%"),
        ({"ema_decay": 0.99}, 400, None),
        ({"ema_decay": 0.9999, "ema_warmup": "ratio"}, 40, None),
        ({"ema_decay": 0.9999, "ema_start_step": 1}, 40, None),
    ],
)
def test_averages_that_stay_at_the_initial_weights_are_warned_of(options, steps, share):
    optimizer = FusedEmaAdam([torch.nn.Parameter(torch.ones(2))], **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_initial_weights([optimizer], steps)
    assert [share in str(warning.message) for warning in found] == ([] if share is None else [True])


def test_a_training_warns_of_a_decay_that_is_too_large_for_its_steps(tmp_path):
    sentence = f"after {STEPS} steps with ema_decay=0.9 the EMA weights are still 53.1% initial"
    with pytest.warns(UserWarning, match=sentence):
        make_trainer(tmp_path).train()


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [({}, False), ({"learning_rate": 1e-2}, False), ({"learning_rate": 3e-4}, True)],
    ids=["default", "the optimizer's", "another"],
)
def test_a_learning_rate_that_the_trainer_ignores_is_warned_of_once(arguments, warns, tmp_path):
    arguments |= {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    trainer = make_trainer(tmp_path, callbacks=[ReportCallback()], **arguments)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        trainer.train()
    said = [str(one.message) for one in found if "learning_rate" in str(one.message)]
    assert len(said) == warns
    for sentence in said:
        assert sentence.startswith("TrainingArguments.learning_rate=0.0003 is ignored")
        assert sentence.endswith("whose lr is 0.01; pass lr=0.0003 to the optimizer")


def test_a_patched_model_does_not_warn_while_the_package_is_disabled():
    with warnings.catch_warnings(), disabled():
        warnings.simplefilter("error")
        patch_model(make().train())(**batch()).loss.backward()


HALF = 2
ADAPTERS = {
    "LoRA": {"r": 2, "target_modules": ["q_proj"]},
    "LoRA and the head": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "prompts": {"num_virtual_tokens": 3},
}
each_adapter = pytest.mark.parametrize("kind", ADAPTERS)
each_kind = pytest.mark.parametrize("kind", ["the model", *ADAPTERS])


def trainer_of(kind, folder, **arguments):
    torch.manual_seed(0)
    model = make()
    if kind in ADAPTERS:
        config = peft.PromptTuningConfig if kind == "prompts" else peft.LoraConfig
        model = peft.get_peft_model(model, config(**ADAPTERS[kind], task_type="CAUSAL_LM"))
    steps = {"max_steps": 2 * HALF, "save_steps": HALF, "eval_strategy": "no"}
    return make_trainer(folder, model, **{**steps, **arguments})


def weights_of(model):
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


def assert_same(found, expected):
    assert found
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_kind
def test_training_resumes_from_a_checkpoint_with_the_same_losses_weights_and_averages(kind, tmp_path):
    whole, resumed = trainer_of(kind, tmp_path), trainer_of(kind, tmp_path)
    whole.train()
    resumed.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{HALF}")
    assert resumed.losses == whole.losses[HALF:]
    assert_same(weights_of(resumed.model), weights_of(whole.model))
    states = (one.optimizer.optimizer.state.values() for one in (resumed, whole))
    assert_same(*([state["ema_params"] for state in each] for each in states))


@each_adapter
def test_a_checkpoint_has_the_adapter_with_ema_weights(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path)
    trainer.train()
    saved = load_file(f"{tmp_path}/checkpoint-{2 * HALF}/ema/adapter/adapter_model.safetensors")
    weights = peft.get_peft_model_state_dict(trainer.model)
    assert any(not torch.equal(one, weights[name]) for name, one in saved.items())
    with trainer.optimizer.optimizer.swap_ema_params():
        assert_same(saved, peft.get_peft_model_state_dict(trainer.model))


@each_kind
def test_the_best_model_has_the_averages_that_were_evaluated(kind, tmp_path):
    # By this metric the first evaluation is the best, so the last averages differ.
    measure = {"metric_for_best_model": "loss", "greater_is_better": kind != "prompts"}
    evaluated = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": HALF}
    trainer = trainer_of(kind, tmp_path, **measure, **evaluated)
    trainer.train()
    assert trainer.state.best_global_step == HALF
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
