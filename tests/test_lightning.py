"""Lightning with FusedEmaAdam and EmaCallback."""

from torch_aclnn_ops.integrations.lightning import EmaCallback, ReportCallback
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

BATCHES = 4


class Model(LightningModule):
    """Learns to return zeros, and records the losses of its steps."""

    def __init__(self, optimizers=1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.optimizers_wanted = optimizers
        self.losses, self.seen = [], []
        self.automatic_optimization = optimizers == 1

    def loss(self, rows):
        return self.layers[1](self.layers[0](rows)).square().mean()

    def training_step(self, rows, index):
        loss = self.loss(rows)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def validation_step(self, rows, index):
        self.seen.append({name: one.clone() for name, one in self.named_parameters()})
        self.log("val_loss", self.loss(rows))

    test_step = validation_step

    def configure_optimizers(self):
        if self.optimizers_wanted == 2:
            return [FusedEmaAdam(layer.parameters(), lr=0.1, ema_decay=0.5) for layer in self.layers]
        return FusedEmaAdam(self.parameters(), lr=0.1, ema_decay=0.5)


def make_trainer(*callbacks, epochs=2, **options):
    return Trainer(
        **{"accelerator": "cpu", **options},
        max_epochs=epochs,
        callbacks=[EmaCallback(), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
    )


def rows():
    return DataLoader(torch.randn(BATCHES * 2, 3, generator=torch.Generator().manual_seed(1)), 2)


def fit(trainer, model, **options):
    trainer.fit(model, rows(), rows(), **options)
    return model


def trained(*callbacks, model=None, **options):
    """Return the trainer with the callback after its training, and the model."""
    trainer = make_trainer(*callbacks, **options)
    return trainer, fit(trainer, Model() if model is None else model)


def averages_of(trainer, model):
    states = {name: one for optimizer in trainer.optimizers for name, one in optimizer.state.items()}
    return {name: states[one]["ema_params"] for name, one in model.named_parameters()}


def equal(state, expected):
    return state.keys() == expected.keys() and all(torch.equal(state[name], one) for name, one in expected.items())


@pytest.mark.parametrize("optimizers", [1, 2])
def test_validation_uses_the_averages_and_restores_the_weights(optimizers):
    trainer, model = trained(model=Model(optimizers))
    averages = averages_of(trainer, model)
    assert equal(model.seen[-1], averages)
    assert not equal(model.state_dict(), averages)
    trainer.test(model, rows(), verbose=False)
    assert equal(model.seen[-1], averages)


def test_a_checkpoint_given_to_a_later_loop_is_what_it_evaluates_until_the_next_fit(tmp_path):
    trainer, model = trained(ModelCheckpoint(tmp_path, save_top_k=-1))
    first = torch.load(min(tmp_path.glob("*.ckpt")), weights_only=True)["state_dict"]
    assert not equal(first, averages_of(trainer, model))
    for path in (min(tmp_path.glob("*.ckpt")), None):
        trainer.test(model, rows(), ckpt_path=path, verbose=False)
        assert equal(model.seen[-1], first)
    trainer.fit_loop.max_epochs += 1
    fit(trainer, model)
    assert equal(model.seen[-1], averages_of(trainer, model))


def test_training_equals_that_without_the_callback():
    trainer = make_trainer()
    trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, EmaCallback)]
    assert fit(trainer, Model()).losses == fit(make_trainer(), Model()).losses


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_checkpoint_is_the_model_that_was_validated(optimizers, tmp_path):
    _, model = trained(ModelCheckpoint(tmp_path, "model"), model=Model(optimizers))
    assert equal(Model.load_from_checkpoint(tmp_path / "model.ckpt").state_dict(), model.seen[-1])
    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert equal(checkpoint["current_model_state"], model.state_dict())


def test_a_checkpoint_of_weights_alone_has_the_ema_weights_if_it_is_saved_inside_a_swap(tmp_path):
    trainer, model = trained()
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with trainer.optimizers[0].swap_ema_params():
        trainer.save_checkpoint(tmp_path / "averages.ckpt", weights_only=True)
    for name, expected in {"weights": model.state_dict(), "averages": averages_of(trainer, model)}.items():
        assert equal(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"], expected)


class Normalized(Model):
    """Has batch norm, whose buffers are averaged."""

    def __init__(self):
        super().__init__()
        self.layers[0] = nn.BatchNorm1d(3)

    def configure_optimizers(self):
        return FusedEmaAdam(self.parameters(), lr=0.1, ema_decay=0.5, ema_buffers=self)


def test_a_checkpoint_has_the_averages_of_buffers(tmp_path):
    trainer, model = trained(epochs=1, model=Normalized())
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=False)
    average = trainer.optimizers[0].ema_state_dict(model)["layers.0.running_mean"]
    assert torch.equal(checkpoint["state_dict"]["layers.0.running_mean"], average)
    assert not torch.equal(model.layers[0].running_mean, average)


def _compiled():
    model = Model()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    return model


@pytest.mark.parametrize("make", [Model, _compiled, Normalized])
def test_training_resumes_from_a_checkpoint_with_the_same_losses_weights_and_averages(make, tmp_path):
    whole_trainer, whole = trained(model=make(), epochs=4)
    trained(ModelCheckpoint(tmp_path, "model"), model=make(), epochs=2)
    trainer = make_trainer(epochs=4)
    resumed = fit(trainer, make(), ckpt_path=tmp_path / "model.ckpt")
    assert resumed.losses == whole.losses[2 * BATCHES :]
    assert equal(resumed.state_dict(), whole.state_dict())
    assert equal(averages_of(trainer, resumed), averages_of(whole_trainer, whole))


class Migrated(Model):
    """Changes the bias of a checkpoint to 7."""

    first = None

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        state["layers.1.bias"] = state.pop("layers.1.offset").fill_(7)

    def training_step(self, rows, index):
        if self.first is None:
            self.first = self.layers[1].bias.detach().clone()
        return super().training_step(rows, index)


def test_training_resumes_with_what_on_load_checkpoint_makes_of_the_state_dict(tmp_path):
    path = tmp_path / "one.ckpt"
    trainer, _ = trained(epochs=1)
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=False)
    for key in ("state_dict", "current_model_state"):
        checkpoint[key]["layers.1.offset"] = checkpoint[key].pop("layers.1.bias")
    torch.save(checkpoint, path)
    assert (fit(make_trainer(epochs=2), Migrated(), ckpt_path=path).first == 7).all()


def test_a_state_dict_without_the_parameters_raises(tmp_path):
    trainer, model = trained(epochs=1)
    model.register_state_dict_post_hook(lambda _, state, *__: state.update({k: v.half() for k, v in state.items()}))
    with pytest.raises(ValueError, match="must return its parameters, but some are missing or replaced"):
        trainer.save_checkpoint(tmp_path / "one.ckpt")


def test_a_resumed_training_without_the_callback_is_warned_of(tmp_path):
    trainer, _ = trained(epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    plain = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.warns(UserWarning, match=r"Please add the following callbacks: \['EmaCallback'\]"):
        fit(plain, Model(), ckpt_path=tmp_path / "one.ckpt")


class Clipped(Model):
    """Records the norms of the gradients that the optimizer gets, which it clips itself unless a trainer does."""

    def __init__(self, own=False):
        super().__init__()
        self.own, self.norms = own, []

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.keep_norm)
        return optimizer

    def keep_norm(self, optimizer, *_):
        self.norms.append(nn.utils.get_total_norm([one.grad for one in self.parameters()]).item())

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.01 if self.own else gradient_clip_val)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("own", [False, True], ids=["by the trainer", "by the model"])
def test_gradients_are_clipped(precision, own):
    options = {} if own else {"gradient_clip_val": 0.01}
    model = fit(make_trainer(precision=precision, **options), Clipped(own))
    assert len(model.norms) == 2 * BATCHES and max(model.norms) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_weights_are_restored_if_a_validation_fails(error):
    class Failing(Model):
        def validation_step(self, rows, index):
            super().validation_step(rows, index)
            if not self.trainer.sanity_checking:
                raise error

    trainer, model = make_trainer(), Failing()
    with pytest.raises((ValueError, SystemExit, KeyboardInterrupt)):
        fit(trainer, model)
    assert equal(model.seen[-1], averages_of(trainer, model))
    assert not equal(model.state_dict(), model.seen[-1])
    trainer.optimizers[0].state_dict()  # raises while the model holds its averages


def test_a_swap_inside_a_validation_raises():
    class Swapping(Model):
        def validation_step(self, rows, index):
            with self.trainer.optimizers[0].swap_ema_params():
                super().validation_step(rows, index)

    with pytest.raises(RuntimeError, match="inside swap_ema_params"):
        fit(make_trainer(), Swapping())


class WithoutAverages(Model):
    """A model whose optimizer has no averages."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Subclass(EmaCallback):
    pass


ERROR_INPUTS = {
    "no averages": (WithoutAverages, (), "must return a FusedEmaAdam, but the optimizers are: SGD"),
    "Lightning's own averages": (Model, (EMAWeightAveraging(),), "there is a EMAWeightAveraging; remove one of them"),
    "the callback and its subclass": (Model, (Subclass(),), "there is a Subclass; remove one of them"),
    "a checkpoint of weights only": (Model, (ModelCheckpoint(save_weights_only=True),), "save_weights_only.*False"),
}


@pytest.mark.parametrize(("model", "callbacks", "sentence"), ERROR_INPUTS.values(), ids=ERROR_INPUTS)
def test_unsupported_trainer_settings_raise_before_training(model, callbacks, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(make_trainer(*callbacks), model())


@pytest.mark.parametrize("steps", [2, 100])
def test_a_report_counts_the_first_steps(steps, tmp_path):
    callback = ReportCallback(steps)
    make_trainer(callback, epochs=1, default_root_dir=tmp_path).fit(Model(), rows())
    counts = callback.report.as_dict()["operators"]["apply_fused_ema_adam_"]
    assert counts["calls"] == min(steps, BATCHES) * len(list(Model().parameters()))
