"""The output of a language model's training run: a table of the losses, a plot and a summary."""

import csv
import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from atomic_save import replacing
from lm_reference import Comparison
from matplotlib.figure import Figure
from text_data import VOCABULARY_SIZE

FINAL_STEPS = 20
SMOOTHED_STEPS = 20


@dataclass(frozen=True)
class Result:
    """The outcome of a training run."""

    losses: list[float]
    validation_losses: dict[int, tuple[float, float]]
    unigram_cross_entropy: float
    parameters: int
    training_tokens: int
    tokens_per_second: float | None
    sample: str
    comparison: Comparison | None

    @property
    def final_loss(self) -> float:
        """The mean training loss of the last steps."""
        return mean_of_last(self.losses)


def mean_of_last(losses: list[float]) -> float:
    """Return the mean of the last losses, because single ones are noisy."""
    last = losses[-FINAL_STEPS:]
    return sum(last) / len(last)


def write_table(result: Result, path: Path) -> None:
    """Write one row per step, with every digit of the losses."""
    with replacing(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "training", "validation", "validation_ema", "training_reference"])
        for index, loss in enumerate(result.losses):
            raw, averaged = result.validation_losses.get(index + 1, ("", ""))
            reference = result.comparison.reference_losses[index] if result.comparison else ""
            writer.writerow([index + 1, loss, raw, averaged, reference])


def write_plot(result: Result, path: Path) -> None:
    """Plot the losses against the steps."""
    figure = Figure(figsize=(4, 4.4), layout="constrained")  # also readable on a phone
    axes = figure.add_subplot(xlabel="step", ylabel="cross entropy (nats per token)")
    steps = range(1, len(result.losses) + 1)
    axes.plot(steps, result.losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training")
    axes.plot(steps, running_mean(result.losses), color="tab:blue", label=f"training, mean of {SMOOTHED_STEPS} steps")
    if result.comparison is not None:
        smoothed = running_mean(result.comparison.reference_losses)
        axes.plot(steps, smoothed, color="black", linestyle=":", label="the same with torch's own operators")
    validated = sorted(result.validation_losses.items())
    points = [step for step, _ in validated]
    axes.plot(points, [raw for _, (raw, _) in validated], "o-", color="tab:orange", label="validation, raw weights")
    axes.plot(points, [ema for _, (_, ema) in validated], "s-", color="tab:green", label="validation, EMA weights")
    uniform = math.log(VOCABULARY_SIZE)
    axes.axhline(uniform, color="gray", linestyle="--", label=f"ln {VOCABULARY_SIZE} = {uniform:.3f}")
    unigram = result.unigram_cross_entropy
    axes.axhline(unigram, color="tab:red", linestyle="--", label=f"unigram entropy = {unigram:.3f}")
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    axes.grid(alpha=0.3)
    with replacing(path) as file:
        figure.savefig(file, dpi=150)


def running_mean(losses: list[float]) -> list[float]:
    """Return for each step the mean of the losses up to it, over at most ``SMOOTHED_STEPS``."""
    sums = [0.0, *accumulate(losses)]
    begins = [max(0, end - SMOOTHED_STEPS) for end in range(1, len(sums))]
    return [(sums[end] - sums[begin]) / (end - begin) for end, begin in enumerate(begins, start=1)]


def summary(result: Result, files: list[Path]) -> str:
    """Return the lines printed at the end of a run."""
    steps = len(result.losses)
    raw, averaged = result.validation_losses[steps]
    speed = f"{result.tokens_per_second:,.0f} tokens/s" if result.tokens_per_second else "no steps left to do"
    lines = [
        result.sample,
        f"model          {result.parameters:,} parameters, {steps} steps, {result.training_tokens:,} tokens",
        f"speed          {speed}",
        f"training loss  {result.losses[0]:.3f} at the first step (ln {VOCABULARY_SIZE} = "
        f"{math.log(VOCABULARY_SIZE):.3f}), {result.final_loss:.3f} at the end (mean of {min(steps, FINAL_STEPS)})",
        f"to beat        {result.unigram_cross_entropy:.3f}, the entropy of unigram statistics",
        f"validation     {raw:.3f} with the raw weights, {averaged:.3f} with the EMA weights",
        *comparison_summary(result.comparison),
        "files          " + ", ".join(str(path) for path in files),
        f"Shown: {steps} steps with this package's embedding, losses and optimizer bring a language model from"
        f" {result.losses[0]:.2f} to {result.final_loss:.2f} nats a token;\non text that it has not seen it has"
        f" {raw:.2f}, and {averaged:.2f} with EMA weights.",
    ]
    return "\n".join(lines)


def launch_summary(launches: dict[str, int]) -> str:
    """Return lines with the number of launches of each CANN operator on an NPU."""
    launched = {name: count for name, count in sorted(launches.items()) if count > 0}
    return "\n".join(["launched on the NPU", *(f"{count:>9,} x {name}" for name, count in launched.items())])


def comparison_summary(comparison: Comparison | None) -> list[str]:
    """Return the lines that compare a run with its reference."""
    if comparison is None:
        return []
    verdict = "within rounding" if comparison.is_within_rounding else "MORE THAN ROUNDING"
    return [
        f"reference      {mean_of_last(comparison.reference_losses):.3f} at the end with torch's own operators, "
        f"{comparison.reference_ema_validation_loss:.3f} in validation with their EMA weights",
        f"difference     {largest_and_mean(comparison.differences)} per step: {verdict}",
        f"control        {largest_and_mean(comparison.control_differences)} between the reference and itself after "
        "one rounding of the initial weights",
    ]


def largest_and_mean(differences: list[float]) -> str:
    """Return a phrase with the largest and the mean difference."""
    return f"{max(differences):.1e} at most, {sum(differences) / len(differences):.1e} on average"
