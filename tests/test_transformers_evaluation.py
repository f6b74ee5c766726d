"""Evaluation of patched models with ``eval_logits=False``: the loss of the original model, without logits."""

import copy
import warnings
from contextlib import nullcontext

from torch_aclnn_ops.integrations.transformers import EmaCallback, patch_model

import peft
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests._language_models import CHUNK, FAMILIES, LOGITS, batch, make
from tests._modes import Largest
from tests.test_hf_trainer import make_trainer
from tests.test_transformers_wrapped import CASES, adapted


def _patch(model):
    return patch_model(model, chunk_size=CHUNK, eval_logits=False)


def _call(model, mode=torch.no_grad, **call):
    """Return a model's output, and the number of elements of the largest tensor."""
    largest = Largest()
    with mode(), largest:
        output = model(**(call or batch()))
    return output, largest.elements


def _assert_loss_is_that_of(model, patched=None):
    """Compare an output and the number of elements with those of the original model."""
    wanted, largest_as_it_was = _call(model)
    output, largest = _call(_patch(model) if patched is None else patched)
    torch.testing.assert_close(output.loss, wanted.loss, rtol=2e-5, atol=0)
    assert output.logits is None and type(output) is type(wanted)
    assert list(output) == [name for name in wanted if name != "logits"]
    assert largest < LOGITS <= largest_as_it_was


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_the_model_as_it_was(family):
    _assert_loss_is_that_of(make(family).eval())


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("LoRA") and not CASES[name].warning])
def test_adapters_of_the_head_are_in_the_loss(name):
    _assert_loss_is_that_of(adapted(CASES[name]).eval())


MODES = {
    "eval": (False, nullcontext, 2e-5),
    "eval, inference_mode": (False, torch.inference_mode, 2e-5),
    "train, no_grad": (True, torch.no_grad, 2e-5),
    "train, inference_mode": (True, torch.inference_mode, 2e-5),
    "eval, autocast": (False, lambda: torch.autocast("cpu", torch.bfloat16), 3e-2),
}


@pytest.mark.parametrize(("is_training", "mode", "tolerance"), MODES.values(), ids=MODES)
@pytest.mark.parametrize("family", ["gemma2", "phi"])
def test_every_mode_of_evaluation_returns_no_logits(family, is_training, mode, tolerance):
    model = make(family).train(is_training)
    expected, found = (_call(one, mode) for one in (copy.deepcopy(model), _patch(model)))
    torch.testing.assert_close(found[0].loss, expected[0].loss, rtol=tolerance, atol=0)
    assert found[0].logits is None and found[1] < LOGITS
    assert found[0].loss.requires_grad == expected[0].loss.requires_grad


def test_a_call_without_labels_returns_logits():
    model = make().eval()
    tokens = batch()["input_ids"]
    with torch.no_grad():
        expected, generated = model(tokens).logits, model.generate(tokens[:, :8], max_new_tokens=4, do_sample=False)
        _call(_patch(model))
        assert torch.equal(model(tokens).logits, expected)
        assert torch.equal(model.generate(tokens[:, :8], max_new_tokens=4, do_sample=False), generated)


def test_other_forms_of_a_call_have_the_loss_and_no_logits():
    model = _patch(make().eval())
    expected, given = _call(model)[0].loss, batch()
    with torch.no_grad():
        loss, logits, *_ = model(**given, return_dict=False)
        by_position = model(given["input_ids"], None, None, None, None, given["labels"])
    assert logits is None and by_position.logits is None
    assert loss == by_position.loss == expected


def test_compiled_evaluation_is_one_graph_and_returns_no_logits():
    model = make().eval()
    expected = _call(model)
    compiled = torch.compile(_patch(model), fullgraph=True, backend="eager")
    with torch.no_grad():
        output = compiled(**batch())
        logits = compiled(input_ids=batch()["input_ids"]).logits
    torch.testing.assert_close(output.loss, expected[0].loss, rtol=2e-5, atol=0)
    torch.testing.assert_close(logits, expected[0].logits)
    assert output.logits is None


def test_a_loss_that_needs_logits_is_warned_of_and_returns_them():
    model = make().eval()
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.softmax(-1).sum()
    with pytest.warns(UserWarning, match="saves no memory: softmax needs them"):
        output, _ = _call(_patch(model))
    assert isinstance(output.logits, torch.Tensor)


def test_an_adapter_that_bypasses_the_head_is_warned_of():
    model = peft.get_peft_model(make(), peft.HRAConfig(target_modules=["lm_head"], r=4)).eval()
    expected = _call(model)[0]
    with pytest.warns(UserWarning, match="saves no memory: its head, .* was not called as a linear layer"):
        output, _ = _call(_patch(model))
    torch.testing.assert_close(output.loss, expected.loss)


def test_a_trainer_evaluates_without_logits(tmp_path):
    expected = make_trainer(tmp_path, make(), average=False).evaluate()["eval_loss"]
    trainer, largest = make_trainer(tmp_path, _patch(make()), average=False), Largest()
    with largest:
        found = trainer.evaluate()["eval_loss"]
    assert found == pytest.approx(expected, rel=2e-5) and largest.elements < LOGITS


def test_a_trainer_with_metrics_gets_no_predictions_and_a_warning(tmp_path):
    trainer = make_trainer(tmp_path, _patch(make()))
    trainer.compute_metrics = lambda given: {"size": len(given.predictions)}
    with pytest.warns(UserWarning, match="compute_metrics gets no logits, .* call patch_model.*eval_logits=True"):
        assert trainer.evaluate()["eval_size"] == 0


def _loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize(
    ("eval_logits", "loss", "options"),
    [
        (True, None, {}),
        (False, None, {"label_smoothing_factor": 0.1}),
        (False, _loss, {}),
        (False, None, {"prediction_loss_only": True}),
    ],
    ids=["logits", "smoothing", "own loss", "loss only"],
)
def test_a_trainer_whose_metrics_lack_no_logits_is_not_warned(eval_logits, loss, options, tmp_path):
    model = patch_model(make(), chunk_size=CHUNK, eval_logits=eval_logits)
    trainer = make_trainer(tmp_path, model, **options)
    trainer.compute_loss_func = loss
    trainer.compute_metrics = lambda given: {"size": len(given.predictions)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="EmaCallback")
        found = trainer.evaluate()
    assert "prediction_loss_only" in options or found["eval_size"] == len(trainer.eval_dataset)


def test_a_trainer_whose_metrics_are_of_generated_tokens_is_not_warned(tmp_path):
    model = _patch(make())
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, use_cpu=True, report_to=[]),
        eval_dataset=make_trainer(tmp_path, model, average=False).eval_dataset,
        compute_metrics=lambda given: {"size": len(given.predictions)},
    )
    trainer.add_callback(EmaCallback(trainer))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="EmaCallback")
        assert trainer.evaluate(max_new_tokens=2)["eval_size"] == len(trainer.eval_dataset)


def test_a_trainer_that_predicts_without_labels_is_not_warned_and_gets_logits(tmp_path):
    trainer = make_trainer(tmp_path, _patch(make()))
    trainer.compute_metrics = lambda given: {}
    rows = [{name: row[name] for name in row if name != "labels"} for row in trainer.eval_dataset]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="EmaCallback")
        assert len(trainer.predict(rows).predictions) == len(rows)


def test_after_a_forward_pass_that_raises_logits_are_returned_as_ever():
    model = _patch(make()).eval()
    hook = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _call(model)
    hook.remove()
    with torch.no_grad():
        assert type(model.lm_head(torch.ones(1, 16))) is torch.Tensor
    (output, _) = _call(model, input_ids=batch()["input_ids"])
    assert type(output.logits) is torch.Tensor
    assert type(_call(patch_model(model, chunk_size=CHUNK))[0].logits) is torch.Tensor


@pytest.mark.parametrize("is_head_sharded_alone", [False, True])
def test_a_fully_sharded_model_computes_the_loss_without_logits(is_head_sharded_alone, mesh_of_one):
    model = _patch(make())
    for module in [model.lm_head] * is_head_sharded_alone + [model]:
        fully_shard(module, mesh=mesh_of_one)
    _assert_loss_is_that_of(make().eval(), model.eval())
