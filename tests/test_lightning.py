"""Lightning with FusedEmaAdam and EmaCallback."""

import warnings

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
    """Learns to return zeros, and keeps the losses of its steps."""

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


def _rows():
    return DataLoader(torch.randn(BATCHES * 2, 3, generator=torch.Generator().manual_seed(1)), 2)


def fit(trainer, model, **options):
    trainer.fit(model, _rows(), _rows(), **options)
    return model


def averages_of(trainer, model):
    states = {name: one for optimizer in trainer.optimizers for name, one in optimizer.state.items()}
    return {name: states[one]["ema_params"] for name, one in model.named_parameters()}


def equal(state, expected):
    return state.keys() == expected.keys() and all(torch.equal(state[name], one) for name, one in expected.items())


@pytest.mark.parametrize(("decay", "epochs", "share"), [(0.9, 1, "65.6%"), (0.9, 2, "43.0%"), (0.5, 2, None)])
def test_averages_that_stay_close_to_the_initial_weights_are_warned_of(decay, epochs, share):
    model = Model()
    optimizer = FusedEmaAdam(model.parameters(), lr=0.1, ema_decay=decay)
    model.configure_optimizers = lambda: optimizer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(make_trainer(epochs=epochs), model)
    said = [str(one.message) for one in caught if "initial weights" in str(one.message)]
    assert len(said) == (share is not None)
    assert all(
        f"after {epochs * BATCHES} steps with ema_decay=0.9 the EMA weights are still {share}" in one for one in said
    )


@pytest.mark.parametrize("optimizers", [1, 2])
def test_validation_uses_the_averages_and_restores_the_weights(optimizers):
    trainer = make_trainer()
    model = fit(trainer, Model(optimizers))
    averages = averages_of(trainer, model)
    assert equal(model.seen[-1], averages)
    assert not equal(model.state_dict(), averages)
    trainer.test(model, _rows(), verbose=False)
    assert equal(model.seen[-1], averages)


@pytest.mark.parametrize("loop", ["validate", "test"])
def test_a_checkpoint_given_to_a_later_loop_is_what_it_evaluates_until_the_next_fit(loop, tmp_path):
    trainer = make_trainer(ModelCheckpoint(tmp_path, save_top_k=-1))
    model = fit(trainer, Model())
    first = torch.load(min(tmp_path.glob("*.ckpt")), weights_only=True)["state_dict"]
    assert not equal(first, averages_of(trainer, model))
    for path in (min(tmp_path.glob("*.ckpt")), None):
        getattr(trainer, loop)(model, _rows(), ckpt_path=path, verbose=False)
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
    trainer = make_trainer(ModelCheckpoint(tmp_path, "model"))
    model = fit(trainer, Model(optimizers))
    assert equal(Model.load_from_checkpoint(tmp_path / "model.ckpt").state_dict(), model.seen[-1])
    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert equal(checkpoint["current_model_state"], model.state_dict())


def test_a_checkpoint_of_weights_alone_has_the_ema_weights_if_it_is_saved_inside_a_swap(tmp_path):
    trainer = make_trainer()
    model = fit(trainer, Model())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with trainer.optimizers[0].swap_ema_params():
        trainer.save_checkpoint(tmp_path / "averages.ckpt", weights_only=True)
    for name, expected in {"weights": model.state_dict(), "averages": averages_of(trainer, model)}.items():
        assert equal(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"], expected)


def test_a_checkpoint_is_written_beside_an_optimizer_of_other_tensors(tmp_path):
    model = Model(optimizers=2)
    other = FusedEmaAdam([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer = FusedEmaAdam(model.parameters(), lr=0.1, ema_decay=0.5)
    model.configure_optimizers = lambda: [optimizer, other]
    trainer = make_trainer(ModelCheckpoint(tmp_path))
    fit(trainer, model)
    [path] = tmp_path.glob("*.ckpt")
    saved = torch.load(path, weights_only=False)["state_dict"]
    averages = optimizer.ema_state_dict(model)
    assert all(torch.equal(saved[name], averages[name]) for name in averages)


class WithExtraState(Model):
    """Has an entry in its state dict that is no tensor."""

    def get_extra_state(self):
        return {"rows": 3}

    def set_extra_state(self, state):
        pass


def test_a_checkpoint_has_the_extra_state_of_the_model(tmp_path):
    model = fit(make_trainer(ModelCheckpoint(tmp_path, "model")), WithExtraState())
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert saved.pop("_extra_state") == {"rows": 3}
    assert equal(saved, model.seen[-1])


def test_training_of_a_compiled_layer_resumes_from_its_checkpoint(tmp_path):
    def compiled():
        model = Model()
        model.layers[0] = torch.compile(model.layers[0], backend="eager")
        return model

    trainer = make_trainer(epochs=1)
    fit(trainer, compiled())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = fit(make_trainer(epochs=2), compiled(), ckpt_path=tmp_path / "one.ckpt")
    assert equal(dict(resumed.named_parameters()), dict(fit(make_trainer(epochs=2), compiled()).named_parameters()))


def test_training_resumes_from_a_checkpoint_with_the_same_losses_and_averages(tmp_path):
    whole_trainer = make_trainer(epochs=4)
    whole = fit(whole_trainer, Model())
    fit(make_trainer(ModelCheckpoint(tmp_path, "model"), epochs=2), Model())
    trainer = make_trainer(epochs=4)
    resumed = fit(trainer, Model(), ckpt_path=tmp_path / "model.ckpt")
    assert resumed.losses == whole.losses[2 * BATCHES :]
    assert equal(averages_of(trainer, resumed), averages_of(whole_trainer, whole))


class Normalized(Model):
    """Has batch norm, whose buffers are averaged."""

    def __init__(self):
        super().__init__()
        self.layers[0] = nn.BatchNorm1d(3)

    def configure_optimizers(self):
        return FusedEmaAdam(self.parameters(), lr=0.1, ema_decay=0.5, ema_buffers=self)


def test_a_checkpoint_has_the_averages_of_buffers_and_training_resumes_from_the_buffers(tmp_path):
    trainer = make_trainer(epochs=1)
    model = fit(trainer, Normalized())
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=False)
    average = trainer.optimizers[0].ema_state_dict(model)["layers.0.running_mean"]
    assert torch.equal(checkpoint["state_dict"]["layers.0.running_mean"], average)
    assert not torch.equal(model.layers[0].running_mean, average)
    resumed = fit(make_trainer(epochs=2), Normalized(), ckpt_path=tmp_path / "model.ckpt")
    assert resumed.losses == fit(make_trainer(epochs=2), Normalized()).losses[BATCHES:]


def _in_place(state):
    state["layers.1.bias"].fill_(7)


def _replaced(state):
    state["layers.1.bias"] = torch.full((3,), 7.0)


def _renamed(state):
    state["layers.1.bias"] = state.pop("layers.1.offset").fill_(7)


class Migrated(Model):
    """Changes the bias of a checkpoint to 7."""

    def __init__(self, migrate):
        super().__init__()
        self.migrate, self.first = migrate, None

    def on_load_checkpoint(self, checkpoint):
        self.migrate(checkpoint["state_dict"])

    def training_step(self, rows, index):
        if self.first is None:
            self.first = self.layers[1].bias.detach().clone()
        return super().training_step(rows, index)


@pytest.mark.parametrize("migrate", [_in_place, _replaced, _renamed])
def test_training_resumes_with_what_on_load_checkpoint_makes_of_the_state_dict(migrate, tmp_path):
    path = tmp_path / "one.ckpt"
    trainer = make_trainer(epochs=1)
    fit(trainer, Model())
    trainer.save_checkpoint(path)
    if migrate is _renamed:
        checkpoint = torch.load(path, weights_only=False)
        for key in ("state_dict", "current_model_state"):
            checkpoint[key]["layers.1.offset"] = checkpoint[key].pop("layers.1.bias")
        torch.save(checkpoint, path)
    assert (fit(make_trainer(epochs=2), Migrated(migrate), ckpt_path=path).first == 7).all()


class Cast(Model):
    """Saves its parameters, or those of a layer, as float16 copies."""

    def __init__(self, of_layer):
        super().__init__()
        module = self.layers[0] if of_layer else self
        module.register_state_dict_post_hook(self.cast)

    @staticmethod
    def cast(module, state, prefix, _):
        state.update({name: one.half() for name, one in state.items() if name.startswith(prefix)})


@pytest.mark.parametrize("of_layer", [False, True])
def test_casts_in_a_state_dict_are_those_of_the_ema_weights(of_layer, tmp_path):
    trainer = make_trainer(epochs=1)
    model = fit(trainer, Cast(of_layer))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)["state_dict"]
    with trainer.optimizers[0].swap_ema_params():
        assert equal(saved, model.state_dict())
    assert not equal(saved, model.state_dict())


def test_a_resumed_training_without_the_callback_is_warned_of(tmp_path):
    trainer = make_trainer(epochs=1)
    fit(trainer, Model())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    plain = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.warns(UserWarning, match=r"Please add the following callbacks: \['EmaCallback'\]"):
        fit(plain, Model(), ckpt_path=tmp_path / "one.ckpt")


class Clipped(Model):
    """Keeps the norms of the gradients that the optimizer gets, which it clips itself if no trainer does."""

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
    trainer.optimizers[0].state_dict()  # which raises while the model holds its averages


def test_a_swap_inside_a_validation_raises():
    class Swapping(Model):
        def validation_step(self, rows, index):
            with self.trainer.optimizers[0].swap_ema_params():
                super().validation_step(rows, index)

    with pytest.raises(RuntimeError, match="inside swap_ema_params"):
        fit(make_trainer(), Swapping())


def test_a_validation_inside_a_swap_raises():
    class Swapped(Model):
        def on_train_epoch_end(self):
            self.swap = self.trainer.optimizers[0].swap_ema_params()

        def training_step(self, rows, index):
            if index == BATCHES - 1:
                self.swap = self.trainer.optimizers[0].swap_ema_params()
                self.swap.__enter__()
                self.trainer.fit_loop.epoch_loop.val_loop.run()
            return super().training_step(rows, index)

    with pytest.raises(RuntimeError, match="inside swap_ema_params"):
        fit(make_trainer(), Swapped())


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
    make_trainer(callback, epochs=1, default_root_dir=tmp_path).fit(Model(), _rows())
    counts = callback.report.as_dict()["operators"]["apply_fused_ema_adam_"]
    assert counts["calls"] == min(steps, BATCHES) * len(list(Model().parameters()))
