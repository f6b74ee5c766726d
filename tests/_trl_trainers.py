"""TRL's trainers of a tiny model in a folder, whose tokenizer is made here, and what their steps find."""

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainerCallback

from tests._language_models import CLASSES, make
from tests._modes import Largest

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
# By name: the trainer, its arguments, its rows, and what else it is constructed with.
TRAINERS = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, {}, _COMPLETIONS, {}),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, {"use_weighting": True}, PAIRS, {}),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, {"per_device_train_batch_size": 4}, _LABELED, {}),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, _ONLINE, _PROMPTS, {"reward_funcs": _reward}),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, _ONLINE, _PROMPTS, {"reward_funcs": _reward}),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of as many words as the model has classes."""
    words = [*_MARKS, *(f"w{number}" for number in range(CLASSES - len(_MARKS)))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    pad, bos, eos, unk = _MARKS
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk)


class Gradients(TrainerCallback):
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        self.steps.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})


def make_trainer(name: str, folder, model=None, **arguments):
    """Make a trainer, whose model and reference model are those of a folder."""
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
    """What two steps of a trainer found: metrics, gradients, and the elements of the largest tensor."""

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
