"""The example programs, at a size that takes seconds."""

import ast
import contextlib
import csv
import importlib
import io
import json
import pathlib
import re
import runpy
import shutil
import sys
from typing import Any

import host_npu
import pytest
from host_npu.testing import run

from tests._children import run_python

ROOT = pathlib.Path(__file__).parents[1]
SMALL = ("--no-progress", *"--steps 40 --context 32 --width 32 --layers 1 --heads 2 --batch-size 4 --lr 0.01".split())


def _python(*arguments: object, **settings: str) -> str:
    """Return the output of a program, which must succeed."""
    result = run_python(*arguments, **settings)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _run(script: str, *options: object, ranks: int = 1) -> str:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks) if ranks > 1 else ()
    return _python(*torchrun, ROOT / "examples" / script, *options, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def _losses(output: pathlib.Path) -> list[tuple[str, ...]]:
    with (output / "loss.csv").open() as file:
        return [(row["training"], row["validation"], row["validation_ema"]) for row in csv.DictReader(file)]


def run_example(device: str, script: str, *options: str) -> tuple[int, str]:
    """Run an example in a process of host_npu.testing; return its exit status and output."""
    path = ROOT / "examples" / script
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *options]
    status: Any = 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code
    return status or 0, printed.getvalue()


def write_tokens(cache: pathlib.Path) -> None:
    """Write the tokens of a tenth of the standard library to where examples expect those of all of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        text_data = importlib.import_module("text_data")
    texts = text_data.read_standard_library()
    file = cache / f"tokens-{text_data.fingerprint_of(texts)[:16]}.pt"
    text_data.save_atomically(text_data.tokenise(texts[::10]), file)


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory):
    """A full run with its reference: the folder, with the tokens, and the output."""
    output = tmp_path_factory.mktemp("train_lm")
    write_tokens(output / "cache")
    [(status, printed)] = run(run_example, 1, "train_lm.py", *SMALL, "--reference", "--output", str(output), backend="")
    assert status == 0, printed
    return output, printed


@pytest.fixture
def output(reference_run, tmp_path):
    """A folder that already contains the tokens."""
    shutil.copytree(reference_run[0] / "cache", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def error_of(monkeypatch, capsys):
    """Return a function that runs an example in this process, which exits with status 2, and returns its message."""
    monkeypatch.syspath_prepend(ROOT / "examples")

    def error(example: str, *options: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            importlib.import_module(example).main([*options])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return error


def test_the_language_model_learns_and_writes_its_files(reference_run):
    output, printed = reference_run
    losses = [float(training) for training, *_ in _losses(output)]
    assert len(losses) == 40 and abs(losses[0] - 8.3178) < 0.1 and losses[-1] < losses[0] - 0.3
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG") and (output / "checkpoint.pt").exists()
    assert "Shown: 40 steps with this package's embedding, losses and optimizer bring a language model" in printed


_ON_THE_HOST_NPU = """
import gc, json, sys
sys.path.insert(0, {examples!r})
import train_lm, torch
import host_npu

status = train_lm.main(sys.argv[1:])
gc.collect()
torch.npu.synchronize()
torch.npu.empty_cache()
stats = host_npu.stats()
print(json.dumps([status, stats.launches, stats.alive, stats.device_bytes]))
"""

# The relative tolerance. Rounding errors grow in training; over 20 steps of 1024 tokens the runs stay this close.
_ROUNDING = {"float32": 2e-5, "bfloat16": 2e-2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", _ROUNDING)
def test_the_language_model_trains_on_the_host_npu_as_on_the_cpu_without_leaks(dtype, output, tmp_path):
    options = (*SMALL, "--stop-at", "20", "--dtype", dtype)
    _run("train_lm.py", *options, "--output", output)
    on_cpu = _losses(output)
    program = tmp_path / "program.py"
    program.write_text(_ON_THE_HOST_NPU.format(examples=str(ROOT / "examples")))
    printed = _python("-m", "host_npu", program, *options, "--device", "npu", "--output", output)
    for mine, theirs in zip(_losses(output), on_cpu, strict=True):
        assert float(mine[0]) == pytest.approx(float(theirs[0]), rel=_ROUNDING[dtype])
    status, launches, alive, device_bytes = json.loads(printed.splitlines()[-1])
    assert status == 0
    heads = ("LinearOnlineMaxSum", "CrossEntropyLossWithMaxSum", "LinearCrossEntropyLossGrad")
    fused = {f"aclnnFused{name}" for name in heads}
    others = {f"aclnn{name}Backward" for name in ("MseLoss", "BinaryCrossEntropy", "EmbeddingDense")}
    assert others | {"aclnnApplyFusedEmaAdam"} <= set(launches)
    assert (fused <= set(launches)) == (dtype == "bfloat16")  # CANN has no float32 versions
    assert alive["aclTensor"] == alive["aclOpExecutor"] == 0
    assert device_bytes == {"0": 0}
    for name in others:
        assert f"{launches[name]} x {name}" in printed


def test_torchs_own_operators_train_to_the_same_losses_up_to_rounding(reference_run):
    assert "per step: within rounding" in reference_run[1]


@pytest.mark.exhaustive
def test_a_resumed_run_continues_bit_for_bit(reference_run, output):
    _run("train_lm.py", *SMALL, "--stop-at", "17", "--output", output)
    assert len(_losses(output)) == 17
    _run("train_lm.py", *SMALL, "--resume", "--output", output)
    whole, resumed = _losses(reference_run[0]), _losses(output)
    assert [training for training, *_ in resumed] == [training for training, *_ in whole]
    assert resumed[-1] == whole[-1]


@pytest.mark.exhaustive
def test_two_vocab_parallel_processes_train_like_one(reference_run, output):
    options = (*SMALL, "--output", output)
    printed = _run("train_lm.py", *options, "--vocab-parallel", "--stop-at", "12", ranks=2)
    assert printed.count("training loss") == 1  # only one process prints
    assert len(_losses(output)) == 12
    # They have saved a checkpoint as of one process.
    _run("train_lm.py", *options, "--resume")
    found, expected = _losses(output), _losses(reference_run[0])
    losses, wanted = ([float(one) for one in (*(row[0] for row in rows), *rows[-1])] for rows in (found, expected))
    assert losses == pytest.approx(wanted, rel=_ROUNDING["float32"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--steps", "0"], "argument --steps: must be a whole number of at least 1, got '0'"),
        (["--ema-decay", "1"], "argument --ema-decay: must be a number from 0 up to but not including 1, got '1'"),
        (["--width", "30", "--heads", "4"], "width must be a multiple of twice heads, which is 8, got 30"),
        (["--resume"], "there is no checkpoint"),
        (["--vocab-parallel"], "several processes need torchrun: torchrun --nproc-per-node 2"),
    ],
)
def test_an_invalid_option_raises(options, sentence, output, error_of):
    assert sentence in error_of("train_lm", "--no-progress", *options, "--output", str(output))


@pytest.mark.exhaustive
def test_the_digits_beat_their_baselines():
    sentence = "Shown: mse_loss, binary_cross_entropy and FusedEmaAdam take the places of torch's"
    assert sentence in _run("digits.py")


def _ladder() -> list[str]:
    table = re.findall(r"^\|.*\| `([^`]+)` \|", (ROOT / "docs/quick_start.md").read_text(), re.MULTILINE)
    return [re.search(r"examples/(\S+\.py)", command)[1] for command in table]


def test_the_list_of_examples_is_complete():
    programs = [
        str(path.relative_to(ROOT / "examples"))
        for path in (ROOT / "examples").rglob("*.py")
        if "Run ``" in ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert sorted(set(_ladder())) == sorted(programs)


def test_the_first_example_trains_in_twenty_lines():
    text = (ROOT / "examples/drop_in.py").read_text()
    training = text.partition("# The twenty lines.\n")[2].partition("# That was it.\n")[0]
    code = [line for line in training.splitlines() if line.strip() and not line.lstrip().startswith('"""')]
    assert 10 < len(code) <= 20


def test_the_first_example_learns_with_averages_on_a_cpu(capsys):
    runpy.run_path(str(ROOT / "examples/drop_in.py"))
    *_, shown = capsys.readouterr().out.partition("Shown: 200 steps on cpu bring the loss from ")
    by_frequency, raw, averaged = map(float, re.findall(r"\d+\.\d\d", shown))
    assert averaged < raw < by_frequency - 1
    assert "; 0 operators of CANN were launched" in shown


def run_short_ones(device: str, folder: pathlib.Path) -> tuple[str, str]:
    """Run the drop-in example, with fewer steps, and the own operator on the host NPU; return their output."""
    drop_in = folder / "examples/drop_in.py"
    drop_in.parent.mkdir()
    drop_in.write_text((ROOT / "examples/drop_in.py").read_text().replace("= 200, 64, 8,", "= 10, 32, 8,"))
    (folder / "README.md").write_text("text " * 100)
    printed = []
    for path in (drop_in, ROOT / "examples/own_operator/own_operator.py"):
        host_npu.reset()
        status, text = run_example(device, str(path))
        assert status == 0, text
        printed.append(text)
    return printed[0], printed[1]


@pytest.fixture(scope="module")
def short_ones(tmp_path_factory):
    return run(run_short_ones, 1, tmp_path_factory.mktemp("short"), device="npu", backend="")[0]


def test_the_first_example_launches_canns_operators_on_the_host_npu(short_ones):
    # In a step: the backward passes of the embedding and two losses, three operators of the cross entropy, and the
    # optimizer's for each of eight parameters; and the cross entropy of two evaluations without gradients.
    drop_in, _ = short_ones
    assert "Shown: 10 steps on npu" in drop_in and f"; {10 * (3 + 3 + 8) + 2 * 2} operators of CANN" in drop_in


def test_a_custom_operator_is_compiled_tested_and_differentiated_on_the_host_npu(short_ones):
    _, own = short_ones
    assert "refused: aclnnMseLoss refuses the call with status 161002" in own
    assert "has launched aclnnMseLoss 51 times and aclnnMseLossBackward 27 times without an NPU" in own
    assert own.endswith("nothing is left alive.\n")


def test_the_peak_of_a_model_is_that_of_a_manual_calculation_and_of_the_page(monkeypatch, capsys):
    page = (ROOT / "docs/performance.md").read_text()
    command = re.search(r"^python examples/will_it_fit.py (.*)$", page, re.MULTILINE)[1]
    assert command == "--model llama-3-8b --devices 32 --no-checkpointing --memory 60"
    monkeypatch.syspath_prepend(ROOT / "examples")
    importlib.import_module("will_it_fit").main(command.split())
    printed = capsys.readouterr().out
    states = 5 * 4 * 8_030_261_248 // 32
    # 32 layers of two norms, attention with 4096 + 1024 features in 32 heads, and an MLP; and the last norm.
    a_norm = 8 * 4096 + 4
    activations = 8192 * (32 * (2 * a_norm + 4 * (4096 + 1024) + 64 * 32 + 8 * 14336) + a_norm)
    weight, logits = 2 * 128256 * 4096, 8192 * 128256
    with_operator = 6 * (8192 + 128256) * 4096 + 192 * (32768 + 384 * 4096) + 2**24
    peaks = [states + activations + weight + head for head in (12 * logits, with_operator)]
    assert f"peak{peaks[0] / 2**30:>52.2f}{peaks[1] / 2**30:>10.2f}\n" in printed
    assert f"```text\n{printed}```" in page


@pytest.mark.exhaustive
def test_hugging_faces_trainer_resumes_from_its_checkpoint_with_the_same_averages(output):
    options = "--steps 8 --context 32 --width 16 --batch-size 4 --output".split()
    whole = _run("hf_trainer.py", *options, output)
    for step in (6, 8):
        shutil.rmtree(output / f"checkpoint-{step}")
    resumed = _run("hf_trainer.py", *options, output, "--resume")
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]
    assert "Shown: the Trainer of transformers trains without the logits of all tokens" in resumed
    assert (output / "checkpoint-8/ema/model.safetensors").exists()


@pytest.mark.exhaustive
def test_the_digits_with_lightning_beat_their_baseline_and_resume_from_the_checkpoint(tmp_path):
    for options in (["--epochs", "3"], ["--epochs", "6", "--resume"]):
        printed = _run("lightning_digits.py", *options, "--output", tmp_path)
        assert "Shown: Lightning validates EMA weights and saves them in its checkpoints" in printed


@pytest.mark.exhaustive
def test_shards_of_two_processes_learn_and_their_averages_are_swapped_in_and_out(output):
    printed = _run("fsdp2.py", "--steps", "30", "--width", "32", "--output", output, ranks=2)
    assert printed.count("Shown: 30 steps bring the validation loss from ") == 1  # only one process prints
    assert printed.endswith("; after the swap the weights are what they were.\n")
