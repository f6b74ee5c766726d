"""TRL's trainers, whose fused head is computed by linear_cross_entropy."""

import warnings

from torch_aclnn_ops import disabled, report
from torch_aclnn_ops.integrations import trl as integration
from torch_aclnn_ops.integrations.transformers import EmaCallback, patch_model
from torch_aclnn_ops.integrations.trl import patch_trainer, unpatch_trainer
from torch_aclnn_ops.optim import FusedEmaAdam

import peft
import pytest
import torch
import transformers
from host_npu.testing import run

from tests import _trl as trainings
from tests._language_models import CLASSES, batch, make
from tests._trl import CHUNK, TRAINERS, OfModel, Trained, fused, make_trainer, patched

DIFFERENTIABLE = ("loss", "log_probs", "entropy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trl")


@pytest.mark.parametrize("name", TRAINERS)
def test_metrics_and_gradients_of_a_trainer_are_those_of_the_trainer_as_it_was(name, folder):
    expected = Trained(make_trainer(name, folder))
    with report() as counts:
        found = Trained(patch_trainer(make_trainer(name, folder), chunk_size=CHUNK))
    assert counts.as_dict()["operators"]["linear_cross_entropy"]["calls"] >= len(found.gradients)
    assert found.largest == CHUNK * CLASSES < expected.largest
    _assert_found(found, expected)


def _assert_found(found, expected):
    assert [log.keys() for log in found.logs] == [log.keys() for log in expected.logs]
    for log, wanted in zip(found.logs, expected.logs, strict=True):
        # A reward is a tenth of a difference of numbers near 80.
        assert log == pytest.approx(wanted, rel=1e-4, abs=5e-6)
    for step, wanted in zip(found.gradients, expected.gradients, strict=True):
        assert step.keys() == wanted.keys()
        for parameter, gradient in step.items():
            assert (gradient - wanted[parameter]).abs().max() <= 2e-5 * wanted[parameter].abs().max(), parameter


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO"])
def test_a_trainer_evaluates_the_ema_weights_of_an_optimizer_it_is_given(name, folder):
    plain = make_trainer(name, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").train()
    optimizer = FusedEmaAdam(model.parameters(), lr=1e-2, ema_decay=0.2)
    options = {"optimizers": (optimizer, None), "learning_rate": 1e-2}
    trainer = patch_trainer(make_trainer(name, folder, model, **options))
    trainer.add_callback(EmaCallback(trainer))
    trainer.train()
    found = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    for weights, is_same in ((optimizer.ema_state_dict(model), True), (model.state_dict(), False)):
        plain.model.load_state_dict(weights)
        assert (found == pytest.approx(plain.evaluate(plain.train_dataset)["eval_loss"], rel=1e-5)) is is_same


def _outputs(model, autocast=False, **call):
    """Return the results of the fused head, and the gradients of a sum of the differentiable ones."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**(call or batch()), fused_lm_head=True)
    made = [output[name] for name in DIFFERENTIABLE]
    sum((one * torch.linspace(1, 2, one.numel()).view_as(one)).sum() for one in made).backward()
    return output, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_same(found, expected, tolerance=2e-5):
    (output, gradients), (wanted, wanted_gradients) = found, expected
    assert output.keys() == wanted.keys() and gradients.keys() == wanted_gradients.keys()
    for name, one in output.items():
        assert one.dtype == wanted[name].dtype
        torch.testing.assert_close(one, wanted[name], rtol=tolerance, atol=tolerance)
    for name, gradient in gradients.items():
        assert gradient.dtype == wanted_gradients[name].dtype
        assert (gradient - wanted_gradients[name]).abs().max() <= tolerance * wanted_gradients[name].abs().max(), name


MODELS = {
    "tied": ("qwen2", {}),
    "softcap": ("gemma2", {}),
    "bias": ("phi", {}),
    "logits divided": ("granite", {}),
    "logits multiplied": ("cohere", {}),
    "experts": ("mixtral", {}),
    "temperature": ("llama", {"temperature": 0.7}),
    "a softcap and a temperature": ("gemma2", {"temperature": 1.5}),
    "the head in float32": ("llama", {"cast_lm_head_to_fp32": True}),
    "some outputs": ("llama", {"outputs": ("log_probs", "entropy")}),
}


@pytest.mark.parametrize(("family", "options"), MODELS.values(), ids=MODELS)
def test_outputs_of_the_head_and_their_gradients_are_those_of_trl(family, options):
    expected = _outputs(fused(make(family), **options))
    assert_same(_outputs(patched(fused(make(family), **options))), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_16_bit_heads_are_as_near_to_float32_as_those_of_trl(autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    exact = _outputs(fused(make()))[0]
    theirs = _outputs(fused(make().to(dtype)), autocast)[0]
    ours = _outputs(patched(fused(make().to(dtype))), autocast)[0]
    for name in ("log_probs", "entropy", "mean_logits"):
        assert ours[name].dtype == theirs[name].dtype
        assert (ours[name] - exact[name]).abs().mean() <= 1.1 * (theirs[name] - exact[name]).abs().mean()


CALLS = {
    "labels that are shifted": lambda: {"input_ids": batch()["input_ids"], "shift_labels": batch()["labels"]},
    "every label ignored": lambda: {**batch(), "labels": torch.full_like(batch()["labels"], -100)},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_labels_are_understood_as_trl_does(call):
    assert_same(_outputs(patched(fused(make())), **call()), _outputs(fused(make()), **call()))


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["the body alone", "the head saved with them"])
def test_adapters_of_the_body_are_trained_as_by_trl(saved):
    def adapted():
        torch.manual_seed(0)
        options = {"target_modules": ["q_proj"], "modules_to_save": saved, "init_lora_weights": False}
        return peft.get_peft_model(fused(make()), peft.LoraConfig(**options))

    assert_same(_outputs(patched(adapted())), _outputs(adapted()))


def test_a_compiled_model_finds_the_same_and_computes_what_its_patch_says_at_every_step():
    expected = _outputs(fused(make()))
    model = patched(fused(make()))
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        with report() as counts:
            output, gradients = _outputs(compiled)
        assert counts.as_dict()["operators"]["linear_cross_entropy"]["calls"]
        gradients = {name.removeprefix("_orig_mod."): one for name, one in gradients.items()}
        assert_same((output, gradients), expected)
    unpatch_trainer(OfModel(model))
    assert _calls(lambda: _outputs(compiled)) == 0
    patched(model)
    assert _calls(lambda: _outputs(compiled)) > 0


class Packed(torch.Tensor):
    """A stand-in for the weights of quantization libraries, which are subclasses."""


def _quantize(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().as_subclass(Packed))


UNREAD = {
    "adapters": (
        lambda model: peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["lm_head"]), model),
        r'has adapters \(Linear\), .*; leave "lm_head" out of target_modules',
    ),
    "quantized": (_quantize, r"is quantized \(Packed\), .*; leave the head out of the quantization"),
}


@pytest.mark.parametrize("is_before_the_patch", [True, False])
@pytest.mark.parametrize(("change", "sentence"), UNREAD.values(), ids=UNREAD)
def test_a_head_that_is_more_than_its_weight_raises(change, sentence, is_before_the_patch):
    model = fused(make())
    if not is_before_the_patch:
        patched(model)
    change(model)
    with pytest.raises(TypeError, match=f"^patch_trainer: the head of this LlamaForCausalLM {sentence}"):
        if is_before_the_patch:
            patched(model)
        else:
            model(**batch(), fused_lm_head=True)


def test_a_softcap_of_zero_raises_with_the_cure():
    model = make()
    model.config.final_logit_softcapping = 0.0
    with pytest.raises(ValueError, match="final_logit_softcapping must be None or positive.*unpatch_trainer"):
        _outputs(patched(fused(model)))


def _calls(run):
    with report() as counts:
        run()
    return counts.as_dict()["operators"].get("linear_cross_entropy", {"calls": 0})["calls"]


def test_models_that_are_not_patched_use_the_head_of_trl():
    model, other = patched(fused(make())), fused(make())
    assert _calls(lambda: _outputs(model)) and not _calls(lambda: _outputs(other))


def test_unpatch_trainer_and_disabled_take_it_back():
    model = patched(fused(make()))
    with disabled():
        assert not _calls(lambda: _outputs(model))
    unpatch_trainer(OfModel(model))
    assert not _calls(lambda: _outputs(model))
    unpatch_trainer(OfModel(model))
    assert _calls(lambda: _outputs(patched(model)))


def test_reference_models_are_found_in_what_accelerate_puts_around_them(folder):
    calls = []
    for options in ({}, {"bf16": True}):
        trainer = patch_trainer(make_trainer("DPO", folder, max_steps=1, **options))
        calls.append(_calls(trainer.train))
    assert calls == [3, 3]  # the log-probabilities of both models, and the sums of squares of the first


WITH_LOGITS = {
    "label smoothing": {"label_smoothing_factor": 0.1},
    "a loss function": {"compute_loss_func": lambda outputs, labels, **kwargs: outputs.logits.square().mean()},
}


@pytest.mark.parametrize("options", WITH_LOGITS.values(), ids=WITH_LOGITS)
def test_a_loss_that_needs_logits_warns_once(options, folder):
    expected = Trained(make_trainer("SFT", folder, **options))
    with pytest.warns(UserWarning) as warned:
        found = Trained(patch_trainer(make_trainer("SFT", folder, **options), chunk_size=CHUNK))
    told = [str(one.message) for one in warned if "patch_trainer" in str(one.message)]
    assert len(told) == 1 and "this SFTTrainer computes its loss from the logits of all tokens" in told[0]
    losses, wanted = ([log["loss"] for log in each.logs if "loss" in log] for each in (found, expected))
    assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "warning"), zip(WITH_LOGITS.values(), ([], ["square"]), strict=True), ids=WITH_LOGITS
)
def test_lazy_logits_of_patch_model_serve_such_a_loss(options, warning, folder):
    expected = Trained(make_trainer("SFT", folder, **options))
    trainer = patch_trainer(make_trainer("SFT", folder, **options), chunk_size=CHUNK)
    patch_model(trainer.model, chunk_size=CHUNK, lazy_without_labels=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = Trained(trainer)
    _assert_found(found, expected)
    told = [str(one.message) for one in warned if "patch_" in str(one.message)]
    assert len(told) == len(warning) and all(name in one for name, one in zip(warning, told, strict=True))
    assert warning or found.largest <= CHUNK * CLASSES


@pytest.mark.parametrize("is_patched", [False, True])
def test_a_patched_model_whose_trainer_is_not_patched_warns(is_patched, folder):
    trainer = make_trainer("SFT", folder, patch_model(make()), max_steps=1)
    if is_patched:
        patch_trainer(trainer)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.train()
    told = [str(one.message) for one in warned if "patch_model" in str(one.message)]
    assert len(told) == (not is_patched) and all("call patch_trainer of" in one for one in told)


@pytest.mark.parametrize("function", [patch_trainer, unpatch_trainer])
@pytest.mark.parametrize("name", ["Trainer", "CPOTrainer"])
def test_trainers_without_a_fused_head_raise(name, function):
    trainer = type(name, (OfModel,), {})(make())
    with pytest.raises(TypeError, match=f"the model of this {name} has no fused head.*patch_model serves trainers"):
        function(trainer)


def test_a_version_of_trl_with_another_head_raises(monkeypatch):
    class Another(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels):
            return hidden

    for other in (Another, None):
        monkeypatch.setattr(integration, "_theirs", other)
        with pytest.raises(RuntimeError, match="the fused head of TRL .* takes other arguments than that of TRL 1.16"):
            patched(fused(make()))


@pytest.mark.parametrize("name", ["FSDP1", "ZeRO-3"])
def test_heads_whose_weights_are_not_whole_in_the_backward_pass_raise(name, monkeypatch):
    trainer = OfModel(fused(make()))
    trainer.is_fsdp_enabled = name == "FSDP1"
    monkeypatch.setattr(transformers.integrations.deepspeed, "is_deepspeed_zero3_enabled", lambda: name == "ZeRO-3")
    with pytest.raises(RuntimeError, match=f"{name} gathers the head's weights only in the forward pass.*use FSDP2"):
        patch_trainer(trainer)


def test_a_scale_that_is_not_positive_raises():
    with pytest.raises(ValueError, match="this model's are by -0.3; call unpatch_trainer"):
        _outputs(patched(fused(make("cohere", logit_scale=-0.3))))


@pytest.fixture(scope="module")
def of_two_processes():
    return run(trainings.results, trainings.PROCESSES)[0]


@pytest.mark.exhaustive  # the processes take long to import TRL
@pytest.mark.parametrize("training", trainings.TRAININGS)
def test_several_processes_find_the_gradients_of_one(of_two_processes, training):
    found, model = of_two_processes[training], fused(make())
    assert not isinstance(found, str), found
    (model(**batch(), fused_lm_head=True).log_probs.sum() / trainings.PROCESSES).backward()
    for name, wanted in model.named_parameters():
        assert (found[name] - wanted.grad).abs().max() <= 2e-5 * wanted.grad.abs().max(), name
