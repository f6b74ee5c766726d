"""Train a small language model on the Python standard library, with this package's operators throughout.

Run ``python examples/train_lm.py --minutes 2`` from a checkout; ``--help`` lists the options. With ``torchrun
--nproc-per-node 2 examples/train_lm.py --vocab-parallel``, each process has half of the output head; ``torchrun
--nproc-per-node 2 -m host_npu examples/train_lm.py --device npu --vocab-parallel`` does so on simulated NPUs, connected
by HCCL.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch_aclnn_ops  # (before torch: where torch_npu lacks CANN, torch is not importable otherwise)

import torch
from atomic_save import replacing
from devices import DEVICES, DeviceUnavailableError
from lm_reference import Comparison, ControlTrainer, ReferenceTrainer
from lm_report import Result, launch_summary, summary, write_plot, write_table
from lm_training import DTYPES, CheckpointError, Settings, SettingsError, Trainer
from processes import NoProcessesError, first_process_first, processes
from text_data import load_text_data, unigram_cross_entropy
from tqdm import tqdm
from vocab_parallel import VocabParallelTrainer

VALIDATIONS = 6
# Shorter runs may end above the unigram entropy.
STEPS_TO_BEAT_UNIGRAM = 200
PROMPT = "    def __init__(self,"
SAMPLE_TOKENS = 64
SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class RunOptions:
    """The output folder and limits of a run; they do not affect its numbers."""

    output: Path = Path("runs/train_lm")
    minutes: float = math.inf
    stop_at: int | None = None
    checkpoint_every: int = 200
    resume: bool = False
    reference: bool = False
    progress: bool = True
    vocab_parallel: bool = False


def train(settings: Settings, options: RunOptions) -> Result | None:
    """Train, write the files to ``options.output`` and return the result, or ``None`` if another process does."""
    load = partial(load_text_data, options.output / "cache")
    trainer = (
        VocabParallelTrainer(settings, first_process_first(load))
        if options.vocab_parallel
        else Trainer(settings, load())
    )
    if not trainer.is_first:
        options = replace(options, progress=False)
    if options.resume:
        trainer.load(options.output / "checkpoint.pt")
    tokens_per_second = run(trainer, options)
    sample = sample_text(trainer)
    if not trainer.is_first:
        return None
    comparison = compare(trainer, options.progress) if options.reference else None
    result = Result(
        losses=trainer.losses,
        validation_losses=trainer.validation_losses,
        unigram_cross_entropy=unigram_cross_entropy(trainer.data.training, trainer.data.validation),
        parameters=trainer.parameters,
        training_tokens=trainer.step * settings.batch_size * settings.context,
        tokens_per_second=tokens_per_second,
        sample=sample,
        comparison=comparison,
    )
    write_table(result, options.output / "loss.csv")
    write_plot(result, options.output / "loss.png")
    with replacing(options.output / "sample.txt", "w", encoding="utf-8") as file:
        file.write(result.sample)
    return result


def run(trainer: Trainer, options: RunOptions) -> float | None:
    """Train until the last step or the time limit; return the tokens per second if a step was done."""
    settings = trainer.settings
    first_step = trainer.step
    last_step = min(settings.steps, options.stop_at or settings.steps)
    deadline = time.perf_counter() + 60 * options.minutes
    checkpoint = options.output / "checkpoint.pt"
    speed = None
    with tqdm(
        initial=first_step, total=settings.steps, desc="training", unit="step", disable=not options.progress
    ) as progress:
        while trainer.step < last_step:
            loss = trainer.train_step()
            speed = (trainer.step - first_step) * settings.batch_size * settings.context / trainer.training_seconds
            progress.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            progress.update()
            if trainer.step % math.ceil(settings.steps / VALIDATIONS) == 0:
                trainer.validate()
            if trainer.step % options.checkpoint_every == 0:
                trainer.save(checkpoint)
            if trainer.agree(time.perf_counter() >= deadline):
                break
    if trainer.step not in trainer.validation_losses:
        trainer.validate()
    trainer.save(checkpoint)
    return speed


def compare(trainer: Trainer, show_progress: bool) -> Comparison:
    """Repeat the training with torch's own operators: once unchanged, and once with differently rounded weights."""
    reference = ReferenceTrainer(trainer.settings, trainer.data)
    control = ControlTrainer(trainer.settings, trainer.data)
    for name, other in (("reference", reference), ("control", control)):
        for _ in tqdm(range(trainer.step), desc=name, unit="step", disable=not show_progress):
            other.train_step()
    return Comparison(
        losses=trainer.losses,
        reference_losses=reference.losses,
        control_losses=control.losses,
        ema_validation_loss=trainer.validation_losses[trainer.step][1],
        reference_ema_validation_loss=reference.validate()[1],
        epsilon=control.epsilon,
    )


def sample_text(trainer: Trainer) -> str:
    """Continue a line of Python with the model and its EMA weights."""
    tokenizer = trainer.data.tokenizer
    prompt = tokenizer.encode(PROMPT).ids
    generator = torch.Generator().manual_seed(trainer.settings.seed)
    with trainer.ema_weights():
        greedy = trainer.model.continue_text(prompt, SAMPLE_TOKENS)
        drawn = trainer.model.continue_text(prompt, SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE, generator=generator)
    return (
        f"--- the likeliest continuation ---\n{tokenizer.decode(greedy)}\n"
        f"--- one drawn at temperature {SAMPLE_TEMPERATURE} ---\n{tokenizer.decode(drawn)}\n"
    )


def number(kind: Callable[[str], float], accepts: Callable[[float], bool], accepted: str) -> Callable[[str], float]:
    """Return an argparse type for numbers that ``accepts`` accepts."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"must be {accepted}, got {text!r}")
        return value

    return parse


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Train a small language model on the Python standard library.")
    count = number(int, lambda value: value >= 1, "a whole number of at least 1")
    positive = number(float, lambda value: 0 < value < math.inf, "a number above 0")
    decay = number(float, lambda value: 0 <= value < 1, "a number from 0 up to but not including 1")
    seed = number(int, lambda value: 0 <= value < 2**63, "a whole number from 0 to 2**63 - 1")

    def add(flag: str, meaning: str, **options: Any) -> None:
        parser.add_argument(flag, help=f"{meaning} (default: %(default)s)", **options)

    add("--device", "where to train", choices=DEVICES)
    add("--dtype", "type of the matrix products; the weights are float32 in any case", choices=DTYPES)
    add("--steps", "steps of the learning-rate schedule, after which training ends", type=count)
    add("--batch-size", "windows of text per step", type=count)
    add("--context", "tokens per window", type=count)
    add("--layers", "transformer layers", type=count)
    add("--width", "channels of the model, a multiple of twice --heads", type=count)
    add("--heads", "attention heads", type=count)
    add("--lr", "learning rate after the warm-up", type=positive)
    add("--ema-decay", "decay of the weights' moving average", type=decay)
    add("--seed", "seed of the initial weights and of the order of the text", type=seed)
    add("--output", "directory of the files written", type=Path, metavar="DIR")
    add("--checkpoint-every", "steps from one checkpoint to the next", type=count, metavar="STEPS")
    flag = parser.add_argument
    flag("--minutes", type=positive, help="stop after about this many minutes, wherever the schedule is then")
    flag("--stop-at", type=count, metavar="STEP", help="stop after this step, to go on later with --resume")
    flag("--resume", action="store_true", help="go on from the checkpoint in --output, bit for bit")
    flag("--reference", action="store_true", help="train twice more, with torch's own operators, and compare")
    flag(
        "--vocab-parallel",
        action="store_true",
        help="under torchrun: each process has a part of the output head, and the losses are those of one process",
    )
    flag("--no-progress", dest="progress", action="store_false", help="show no progress bars")
    parser.set_defaults(**vars(Settings()), **vars(RunOptions()))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = build_parser()
    arguments = vars(parser.parse_args(argv))
    options = RunOptions(**{field.name: arguments[field.name] for field in fields(RunOptions)})
    try:
        settings = Settings(**{field.name: arguments[field.name] for field in fields(Settings)})
        with processes(settings.device) if options.vocab_parallel else nullcontext():
            result = train(settings, options)
    except (SettingsError, CheckpointError, DeviceUnavailableError, NoProcessesError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if result is None:
        return 0
    names = ("loss.csv", "loss.png", "checkpoint.pt", "sample.txt")
    print(summary(result, [options.output / name for name in names]))
    if settings.device == "npu":
        print(launch_summary(torch_aclnn_ops.launches()))
    problems = problems_with(result)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def problems_with(result: Result) -> list[str]:
    """Return signs that the training did not work."""
    problems = []
    if len(result.losses) >= STEPS_TO_BEAT_UNIGRAM and not result.final_loss < result.unigram_cross_entropy:
        problems.append(
            f"the final training loss {result.final_loss:.3f} is not below the unigram entropy "
            f"{result.unigram_cross_entropy:.3f}"
        )
    if result.comparison is not None and not result.comparison.is_within_rounding:
        problems.append("the losses are further from those of torch's own operators than rounding explains")
    return problems


if __name__ == "__main__":
    sys.exit(main())
