"""TRL's trainers of a tiny model in a folder and the results of steps, and models with only TRL's fused head."""

from functools import partial

from torch_aclnn_ops.integrations.trl import patch_trainer

import datasets
import torch
import transformers
import trl
from accelerate import Accelerator
from host_npu.testing import results_of
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl.trainer.utils import add_fused_lm_head

from tests._language_models import CLASSES, PROCESSES, make, share
from tests._modes import Largest

CHUNK = 16
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def fused(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    """Give a model TRL's fused head, with all its outputs."""
    add_fused_lm_head(model, **{"outputs": _OUTPUTS, **options})
    return model


class OfModel:
    """The part of a trainer that patch_trainer reads, for a model with TRL's fused head."""

    is_fsdp_enabled = False
    ref_model = None

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.accelerator = model, Accelerator()


def patched(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    """Patch a model with TRL's fused head."""
    patch_trainer(OfModel(model), **{"chunk_size": CHUNK, **options})
    return model


def _fully_sharded(model, mesh, patch_last):
    model = model if patch_last else patched(model)
    for group in (*model.model.layers, model):
        fully_shard(group, mesh=mesh)
    return patched(model)


TRAININGS = {
    "DDP": lambda model, mesh: DistributedDataParallel(patched(model)),
    "FSDP2": partial(_fully_sharded, patch_last=False),
    "FSDP2, patched last": partial(_fully_sharded, patch_last=True),
}


def _gradients(wrap, mesh):
    model = wrap(fused(make()), mesh)
    model(**share(mesh.get_rank()), fused_lm_head=True).log_probs.sum().backward()
    gradients = {name.removeprefix("module."): one.grad for name, one in model.named_parameters()}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in gradients.items()}


def results(device):
    """Return the gradients of every training."""
    mesh = init_device_mesh(device, (PROCESSES,))
    return results_of((name, partial(_gradients, wrap, mesh)) for name, wrap in TRAININGS.items())


STEPS = 2
_MARKS = ["[PAD]", "[BOS]", "[EOS]", "[UNK]"]


def _words(seed: int, count: int) -> str:
    numbers = torch.randint(CLASSES - len(_MARKS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in numbers.tolist())


PAIRS = [
    {"prompt": _words(row, 9), "chosen": f" {_words(10 + row, 8 + row)}", "rejected": f" {_words(20 + row, 12 - row)}"}
    for row in range(4)
]
_COMPLETIONS = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
_LABELED = [{**completion, "label": row % 2 == 0} for row, completion in enumerate(_COMPLETIONS)]
_PROMPTS = [{"prompt": pair["prompt"]} for pair in PAIRS]


def _reward(completions: list[str], **kwargs: object) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


_ONLINE = {"max_completion_length": 9, "num_generations": 2, "beta": 0.1, "temperature": 0.7}
# By name: the trainer, its arguments, its rows, and further constructor arguments.
TRAINERS = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, {}, _COMPLETIONS, {}),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, {"use_weighting": True}, PAIRS, {}),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, {"per_device_train_batch_size": 4}, _LABELED, {}),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, _ONLINE, _PROMPTS, {"reward_funcs": _reward}),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, _ONLINE, _PROMPTS, {"reward_funcs": _reward}),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with as many words as the model has classes."""
    words = [*_MARKS, *(f"w{number}" for number in range(CLASSES - len(_MARKS)))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    pad, bos, eos, unk = _MARKS
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk)


class Gradients(TrainerCallback):
    """Records the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        self.steps.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})


def make_trainer(name: str, folder, model=None, **arguments):
    """Return a trainer whose model and reference model are loaded from a folder."""
    trainer_class, config, options, rows, kwargs = TRAINERS[name]
    if not (folder / "model").exists():
        make().save_pretrained(folder / "model")
    if model is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").train()
    options = {"per_device_train_batch_size": 2, **options, **arguments}
    of_trainer = ("compute_loss_func", "optimizers", "callbacks")
    kwargs = {**kwargs, **{key: options.pop(key) for key in of_trainer if key in options}}
    args = config(
        str(folder),
        **{"max_steps": STEPS, "logging_steps": 1, "learning_rate": 0.1, "optim": "sgd", "bf16": False, **options},
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    dataset = datasets.Dataset.from_list(rows)
    return trainer_class(model, args=args, train_dataset=dataset, processing_class=tokenizer(), **kwargs)


class Trained:
    """The results of two steps of a trainer: metrics, gradients, and the number of elements of the largest tensor."""

    def __init__(self, trainer) -> None:
        gradients, largest = Gradients(), Largest()
        trainer.add_callback(gradients)
        with largest:
            trainer.train()
        self.logs = [
            {name: value for name, value in log.items() if "time" not in name and "per_second" not in name}
            for log in trainer.state.log_history
        ]
        self.gradients, self.largest = gradients.steps, largest.elements
