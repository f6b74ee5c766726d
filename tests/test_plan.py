"""plan: manually calculated estimates, the shapes of models, what a Llama saves, answers, and errors."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from torch_aclnn_ops._plan_costs import BANDWIDTH, FLOPS
from torch_aclnn_ops.plan import MODELS, Layers, Model, main, plan

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

GIB = 2**30
SHAPE = Model(hidden=64, vocab=1000, parameters=100_000)
LAYERS = Layers(number=3, heads=4, kv_heads=2, intermediate=160)
LLAMA = Model(hidden=64, vocab=1000, parameters=250_000, layers=LAYERS)


def test_a_plan_equals_a_manual_calculation():
    found = plan(SHAPE, 4, sequence=512, micro_batch=2)
    rows = 1024
    assert found.rows == rows and found.memory == 64 * GIB
    assert found.ours.states == found.others.states == 20 * 25_000
    assert found.ours.head_weight == found.others.head_weight == 2 * 64 * 1000
    assert found.others.head_backward == 12 * rows * 1000
    assert found.ours.head_backward == 6 * 64 * (rows + 1000) + 192 * (32768 + 384 * 64) + 2**24
    assert found.others.step_buffers == 4 * 25_000
    assert found.ours.head_seconds == pytest.approx(8 * rows * 64 * 1000 / FLOPS)
    assert found.others.head_seconds == pytest.approx(6 * rows * 64 * 1000 / FLOPS + 46 * rows * 1000 / BANDWIDTH)
    assert found.others.optimizer_seconds / found.ours.optimizer_seconds == pytest.approx(92 / 36)


def test_the_peak_is_the_maximum_of_the_heads_backward_pass_and_the_step():
    costs = plan(SHAPE, 1).others
    assert costs.peak == costs.states + costs.head_weight + costs.head_backward
    costs = plan(Model(64, 1000, 10**12), 1).others
    assert costs.peak == costs.states + costs.step_buffers


def test_the_activations_equal_a_manual_calculation():
    rows, norm = 512, 8 * 64 + 4
    attention, gated = 4 * (64 + 32) + 64 * 4, 8 * 160
    weights = 64 * (2 * 64 + 2 * 32 + 3 * 160)
    layer = 2 * norm + attention + gated
    whole = plan(LLAMA, 4, sequence=rows, checkpointing=False).ours
    assert whole.activations == rows * (3 * layer + norm)
    assert whole.layer_backward == rows * 24 * 64 + 6 * weights + 4 * 64 * 1000
    saved = plan(LLAMA, 4, sequence=rows).ours
    assert saved.activations == rows * (3 * 2 * 64 + norm)
    assert saved.layer_backward == rows * (layer + 4 * (160 + 64)) + 6 * weights + 4 * 64 * 1000


def test_the_peak_has_the_activations_in_the_backward_pass():
    costs = plan(LLAMA, 4, sequence=8).others
    assert costs.layer_backward > costs.head_weight + costs.head_backward
    assert costs.peak == costs.states + costs.activations + costs.layer_backward
    costs = plan(LLAMA, 4, sequence=512).others
    assert costs.peak == costs.states + costs.activations + costs.head_weight + costs.head_backward


def test_tensor_parallelism_splits_attention_and_mlp_and_not_the_norms():
    split = plan(LLAMA, 8, sequence=8, tensor_parallel=4, checkpointing=False).ours
    # One head with its key of 16 features, although there are only two of those, and a quarter of the MLP.
    layer = 2 * (8 * 64 + 4) + 4 * (16 + 16) + 64 + 8 * 40
    assert split.activations == 8 * (3 * layer + 8 * 64 + 4)


def test_the_size_of_a_head_is_that_of_the_model_if_it_is_given():
    wide = Model(64, 1000, 250_000, Layers(3, 4, 2, 160, head_dim=32))
    more = plan(wide, 4, checkpointing=False).ours.activations - plan(LLAMA, 4, checkpointing=False).ours.activations
    assert more == 3 * 8192 * 4 * (64 + 32)


def _saved_bytes(model, head, tokens):
    """Return the bytes that a model saves for its backward pass, besides its weights."""
    weights = {one.untyped_storage().data_ptr() for one in (*model.parameters(), head)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = torch.nn.functional.linear(model(tokens).last_hidden_state, head)
    assert logits.requires_grad  # and so everything saved is still there
    return sum(saved.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_llama_of_transformers_saves_what_is_planned(checkpointing):
    config = LlamaConfig(
        hidden_size=64,
        vocab_size=1000,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=160,
        use_cache=False,
    )
    model = LlamaModel(config).bfloat16().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    head = torch.zeros(1000, 64, dtype=torch.bfloat16, requires_grad=True)
    saved = _saved_bytes(model, head, torch.zeros(2, 128, dtype=torch.int64))
    planned = plan(LLAMA, 4, sequence=128, micro_batch=2, checkpointing=checkpointing).ours.activations
    # On a CPU attention saves one logarithm of a head's sum in place of 16 numbers.
    other_attention = 0 if checkpointing else 3 * 256 * 4 * (64 - 4)
    # Tokens and rotary embeddings are not planned.
    assert saved == pytest.approx(planned - other_attention, rel=0.02)


def test_tensor_parallelism_shards_the_head_and_all_devices_shard_the_states():
    whole, shared = plan("llama-3-70b", 64), plan("llama-3-70b", 64, tensor_parallel=8)
    assert shared.ours.states == whole.ours.states
    assert shared.ours.head_weight * 8 == whole.ours.head_weight
    assert shared.others.head_backward * 8 == whole.others.head_backward
    assert "vocab-parallel all-reduce" in shared.collectives and "vocab-parallel all-reduce" not in whole.collectives


def test_one_device_sends_nothing():
    assert plan(SHAPE, 1).collectives == {}


def test_collectives_equal_a_manual_calculation():
    assert plan(SHAPE, 8, tensor_parallel=4, sequence=512).collectives == {
        "vocab-parallel all-gather": 3 * 4 * (4 * 512 + 46),
        "vocab-parallel all-reduce": 2 * 3 * 4 * 512 * 64 // 4,
        "FSDP2 all-gather": 2 * 2 * 100_000 // 8,
        "FSDP2 reduce-scatter": 4 * 100_000 // 8,
        "of these the head's all-gather": 2 * 2 * 64 * 1000 // 8,
        "of these the head's reduce-scatter": 4 * 64 * 1000 // 8,
    }


@pytest.mark.parametrize("tensor_parallel", [1, 3])
def test_the_minimum_number_of_devices_fits_and_one_group_less_does_not(tensor_parallel):
    devices = plan("qwen2.5-72b", tensor_parallel, tensor_parallel=tensor_parallel).fewest_devices()
    for number, holds in ((devices, True), (devices - tensor_parallel, False)):
        found = plan("qwen2.5-72b", number, tensor_parallel=tensor_parallel)
        assert found.fits(found.ours) is holds and (found.left(found.ours) >= 0) is holds


def test_nothing_fits_if_the_logits_alone_do_not_fit():
    found = plan(SHAPE, 1, memory=1e-6)
    assert found.fewest_devices() is None and "no number of devices fits" in str(found)


@pytest.mark.parametrize(
    "model, memory, answer, line",
    [
        (LLAMA, 64, True, r"with this package:    fits, 63\.\d\d of 64 GiB remain"),
        (LLAMA, 0.01, False, r"with this package:    does not fit, 0\.\d\d GiB more than 0\.01 GiB"),
        (SHAPE, 64, None, "with this package:    unknown, .* remain for the layers, whose shape is not given"),
        (SHAPE, 0.001, False, "with this package:    does not fit"),
    ],
)
def test_the_answer_is_yes_or_no_where_the_layers_are_known_or_nothing_is_left(model, memory, answer, line):
    found = plan(model, 2, memory=memory)
    assert found.fits(found.ours) is answer
    assert any(re.match(line, each) for each in str(found).splitlines())


@pytest.mark.parametrize(
    "checkpointing, memory, end",
    [
        (False, 50, "; with activation checkpointing it fits"),
        (False, 5, "; with activation checkpointing it does not fit either"),
        (True, 5, " GiB"),
    ],
)
def test_the_answer_says_whether_checkpointing_makes_a_model_fit(checkpointing, memory, end):
    found = plan("llama-3-8b", 32, checkpointing=checkpointing, memory=memory)
    (answer,) = [line for line in str(found).splitlines() if line.startswith("without this package")]
    assert "does not fit" in answer and answer.endswith(end)
    checkpointed = plan("llama-3-8b", 32, memory=memory)
    assert checkpointed.fits(checkpointed.others) == end.endswith("it fits")


def _dense(hidden, layers, intermediate, keys, vocab, bias):
    """Count the parameters of a Llama or Qwen2: attention with grouped keys, three MLP matrices, two norms a layer."""
    attention = 2 * hidden * hidden + 2 * hidden * keys + bias * (hidden + 2 * keys)
    return 2 * vocab * hidden + layers * (attention + 3 * hidden * intermediate + 2 * hidden) + hidden


@pytest.mark.parametrize("name, bias", [("llama-3-8b", 0), ("llama-3-70b", 0), ("qwen2.5-72b", 1)])
def test_the_parameters_of_a_model_are_those_of_its_layers(name, bias):
    model = MODELS[name]
    layers = model.layers
    keys = model.hidden // layers.heads * layers.kv_heads
    assert model.parameters == _dense(model.hidden, layers.number, layers.intermediate, keys, model.vocab, bias)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            ("llama-4", 8),
            ValueError,
            "model must be a Model or one of llama-3-8b, .*, deepseek-v3, but it is 'llama-4'",
        ),
        ((SHAPE, 0), ValueError, "devices must be an integer of at least 1, but it is 0"),
        ((SHAPE, 2.0), TypeError, "devices must be an integer of at least 1, but it is 2.0"),
        ((Model(0, 5, 5), 1), ValueError, "hidden must be an integer of at least 1, but it is 0"),
        ((Model(8, 5, 5, (1, 2)), 1), TypeError, r"layers must be None or a Layers, but it is \(1, 2\)"),
        ((Model(8, 5, 5, Layers(0, 2, 1, 9)), 1), ValueError, "number must be an integer of at least 1, but it is 0"),
        ((Model(8, 5, 5, Layers(1, 3, 1, 9)), 1), ValueError, "heads must divide hidden = 8 if head_dim is not given"),
        ((Model(8, 5, 5, Layers(1, 4, 3, 9)), 1), ValueError, "kv_heads must divide heads = 4, but it is 3"),
        ((Model(8, 5, 39), 1), ValueError, "parameters must be at least 40, of the head of 5 x 8, but it is 39"),
        (
            (Model(8, 5, 711, Layers(2, 4, 2, 9)), 1),
            ValueError,
            "parameters must be at least 712, of the head of 5 x 8 and the matrices of 2 layers, but it is 711",
        ),
    ],
)
def test_invalid_arguments_raise_with_their_name(arguments, error, message):
    with pytest.raises(error, match=f"plan: {message}"):
        plan(*arguments)


def test_parameters_may_be_those_of_tied_weights_and_of_an_mlp_without_a_gate():
    gpt2 = Model(768, 50257, 124_439_808, Layers(12, 12, 12, 3072))
    assert plan(gpt2, 1).model == gpt2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tensor_parallel": 3}, "tensor_parallel must divide devices = 8, and be at most vocab = 1000, but it is 3"),
        ({"micro_batch": 0}, "micro_batch must be an integer of at least 1, but it is 0"),
        ({"dtype": "float32"}, "dtype must be one of bfloat16, float16, but it is 'float32'"),
        ({"memory": 0}, "memory must be a finite number of GiB above 0, but it is 0"),
    ],
)
def test_invalid_options_raise_with_their_name(options, message):
    with pytest.raises(ValueError, match=f"plan: {message}"):
        plan(SHAPE, 8, **options)


_SHAPE = ["--hidden", "64", "--vocab", "1000", "--parameters", "250000", "--devices", "4"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "gpt", "--devices", "8"], "one of llama-3-8b"),
        (
            ["--devices", "8"],
            "missing --hidden, --vocab, --parameters; pass all of --hidden, --vocab",
        ),
        (["--devices", "8", "--hidden", "8", "--vocab", "100"], "missing --parameters; pass all of --hidden, --vocab"),
        (["--devices", "8", "--model", "llama-3-8b", "--hidden", "8"], "leave out --hidden with --model"),
        (["--devices", "8", "--model", "llama-3-8b", "--layers", "8"], "leave out --layers with --model"),
        ([*_SHAPE, "--layers", "8"], "missing --heads, --intermediate; pass all of --layers, --heads"),
        ([*_SHAPE, "--layers", "8", "--heads", "4"], "missing --intermediate; pass all of --layers"),
        ([*_SHAPE, "--head-dim", "8"], "missing --layers, --heads, --intermediate; pass all"),
        ([*_SHAPE, "--layers=8", "--heads=4", "--intermediate=9", "--kv-heads=0"], "kv_heads must be an integer of"),
    ],
)
def test_the_command_reports_invalid_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], plan(Model(64, 1000, 250_000), 4)),
        (["--layers", "3", "--heads", "4", "--kv-heads", "2", "--intermediate", "160"], plan(LLAMA, 4)),
        (
            ["--layers", "3", "--heads", "4", "--intermediate", "160"],
            plan(Model(64, 1000, 250_000, layers=Layers(3, 4, 4, 160)), 4),
        ),
        (
            ["--layers=3", "--heads=4", "--kv-heads=2", "--intermediate=160", "--head-dim=16", "--no-checkpointing"],
            plan(LLAMA, 4, checkpointing=False),
        ),
    ],
)
def test_the_command_accepts_a_custom_shape(options, expected, capsys):
    assert main([*_SHAPE, *options]) == 0
    assert capsys.readouterr().out.strip() == str(expected)


def test_checkpointing_is_a_bool():
    with pytest.raises(TypeError, match="plan: checkpointing must be a bool, but it is 'full'"):
        plan(LLAMA, 4, checkpointing="full")


def test_the_page_shows_what_its_first_command_prints(capsys):
    page = (Path(__file__).parents[1] / "docs/scale.md").read_text()
    command = re.search(r"^python -m torch_aclnn_ops.plan (.*)$", page, re.MULTILINE)[1]
    shown = re.search(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    main(command.split())
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.parametrize("arguments", [["plan", "--model", next(iter(MODELS)), "--devices", "8"], ["doctor"]])
def test_a_command_ends_quietly_where_nobody_reads_on(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", f"torch_aclnn_ops.{arguments[0]}", *arguments[1:]]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, "")
