"""EmaCallback with a model that Lightning's ModelParallelStrategy shards, in 2 processes."""

import os
from pathlib import Path

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
import torch.distributed as dist
from host_npu.testing import run
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.test_lightning import make_trainer, rows

WORLD_SIZE = 2


class Model(LightningModule):
    """Learns to return zeros; its shards have different sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 5)
        self.seen = []

    def configure_model(self):
        if not dist.is_initialized() or hasattr(self.layer, "unshard"):
            return
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, rows, index):
        return self.layer(rows.to(self.layer.weight.dtype)).square().mean()

    def test_step(self, rows, index):
        self.seen = weights_of(self)

    def configure_optimizers(self):
        return FusedEmaAdam(self.parameters(), lr=0.1, ema_decay=0.5)


def weights_of(model):
    return {name: one.full_tensor().detach().clone() for name, one in model.named_parameters()}


def averages_of(model):
    state = model.optimizers(use_pl_optimizer=False).state
    return {name: state[one]["ema_params"].full_tensor().clone() for name, one in model.named_parameters()}


def trainer(epochs, precision, *callbacks, distributed=False):
    # The variables that torchrun sets.
    rank = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": WORLD_SIZE}
    os.environ.update({name: str(value) for name, value in rank.items()})
    strategy = ModelParallelStrategy(WORLD_SIZE, 1, save_distributed_checkpoint=distributed)
    options = {"devices": WORLD_SIZE, "strategy": strategy, "plugins": [TorchElasticEnvironment()]}
    return make_trainer(*callbacks, epochs=epochs, precision=precision, **options)


def trained(epochs, precision, **options):
    model, one = Model(), trainer(epochs, precision)
    one.fit(model, rows(), **options)
    return model, one


def train_and_resume(device, folder, precision):
    """Return the contents of a checkpoint, the test result with it, and the end of a resumed training."""
    path = Path(folder, f"{precision}.ckpt")
    model, one = trained(1, precision)
    one.save_checkpoint(path)
    results = {"weights": weights_of(model), "averages": averages_of(model)}
    results["file"] = torch.load(path)
    resumed, _ = trained(2, precision, ckpt_path=path)
    whole, _ = trained(2, precision)
    for name, each in (("resumed", resumed), ("uninterrupted", whole)):
        results[name] = {"weights": weights_of(each), "averages": averages_of(each)}
    tested = Model()
    trainer(1, precision).test(tested, rows(), ckpt_path=path, verbose=False)
    results["tested"] = tested.seen
    return results


class Compiled(Model):
    """Its layer's names have a prefix, which Lightning's checkpoints of sharded models lack."""

    def configure_model(self):
        super().configure_model()
        self.layer = torch.compile(self.layer, backend="eager")


def compiled(device, folder):
    """Return the EMA weights in the checkpoint of a compiled model, and those of its optimizer."""
    path = Path(folder, "compiled.ckpt")
    model, one = Compiled(), trainer(1, "32-true")
    one.fit(model, rows())
    one.save_checkpoint(path)
    averages = {name.replace("_orig_mod.", ""): each for name, each in averages_of(model).items()}
    return torch.load(path)["state_dict"], averages


def errors(device, folder):
    """Return the errors of checkpoints of several files: of a fit that would write them, and of a call that does."""
    errors = []
    for callbacks in ([ModelCheckpoint(folder)], []):
        one = trainer(1, "32-true", *callbacks, distributed=True)
        try:
            one.fit(Model(), rows())
            one.save_checkpoint(Path(folder, "several.ckpt"))
        except ValueError as error:
            errors.append(str(error))
    return errors


@pytest.fixture(scope="module", params=["32-true", "bf16-true"])
def found(request, tmp_path_factory):
    return run(train_and_resume, WORLD_SIZE, str(tmp_path_factory.mktemp("sharded")), request.param)


def are_equal(state, expected):
    return state.keys() == expected.keys() and all(
        torch.equal(state[name], one.to(state[name].dtype)) for name, one in expected.items()
    )


def test_a_checkpoint_of_a_sharded_model_has_full_averages_and_weights(found):
    for of_rank in found:
        assert are_equal(of_rank["file"]["state_dict"], of_rank["averages"])
        assert are_equal(of_rank["file"]["current_model_state"], of_rank["weights"])
        assert not are_equal(of_rank["weights"], of_rank["averages"])


def test_a_resumed_training_of_a_sharded_model_ends_where_an_uninterrupted_one_does(found):
    for of_rank in found:
        for name, expected in of_rank["uninterrupted"].items():
            assert are_equal(of_rank["resumed"][name], expected)


def test_a_sharded_model_is_tested_with_the_averages_of_a_checkpoint(found):
    for of_rank in found:
        assert are_equal(of_rank["tested"], of_rank["averages"])


def test_a_checkpoint_of_a_compiled_sharded_model_has_full_averages(tmp_path):
    for state, averages in run(compiled, WORLD_SIZE, str(tmp_path)):
        assert are_equal(state, averages)


def test_checkpoints_of_several_files_raise_before_the_training_or_when_they_are_saved(tmp_path):
    sentence = "EmaCallback: ModelParallelStrategy must have save_distributed_checkpoint=False, because "
    for of_rank in run(errors, WORLD_SIZE, str(tmp_path)):
        assert [error.startswith(sentence) for error in of_rank] == [True, True]
