"""plan: manually calculated estimates, the shapes of models, and errors."""

from torch_aclnn_ops.plan import BANDWIDTH, FLOPS, MODELS, Model, main, plan

import pytest

GIB = 2**30
SHAPE = Model(hidden=64, vocab=1000, parameters=100_000)


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
        "vocab-parallel all-gather": 3 * 4 * (4 * 512 + 36),
        "vocab-parallel all-reduce": 2 * 3 * 4 * 512 * 64 // 4,
        "FSDP2 all-gather": 2 * 2 * 100_000 // 8,
        "FSDP2 reduce-scatter": 4 * 100_000 // 8,
        "of these the head's all-gather": 2 * 2 * 64 * 1000 // 8,
        "of these the head's reduce-scatter": 4 * 64 * 1000 // 8,
    }


def test_the_minimum_number_of_devices_fits_and_half_of_it_does_not():
    devices = plan("qwen2.5-72b", 1).fewest_devices()
    for number, holds in ((devices, True), (devices // 2, False)):
        found = plan("qwen2.5-72b", number)
        assert (found.left(found.ours) > 0) == holds


def test_nothing_fits_if_the_logits_alone_do_not_fit():
    found = plan(SHAPE, 1, memory=1e-6)
    assert found.fewest_devices() is None and "minimum unknown" in str(found)


def _dense(hidden, layers, intermediate, keys, vocab, bias):
    """Count the parameters of a Llama or Qwen2: attention with grouped keys, three MLP matrices, two norms a layer."""
    attention = 2 * hidden * hidden + 2 * hidden * keys + bias * (hidden + 2 * keys)
    return 2 * vocab * hidden + layers * (attention + 3 * hidden * intermediate + 2 * hidden) + hidden


@pytest.mark.parametrize(
    "name, layers, intermediate, bias",
    [("llama-3-8b", 32, 14336, 0), ("llama-3-70b", 80, 28672, 0), ("qwen2.5-72b", 80, 29568, 1)],
)
def test_the_parameters_of_a_model_are_those_of_its_layers(name, layers, intermediate, bias):
    model = MODELS[name]
    assert model.parameters == _dense(model.hidden, layers, intermediate, 1024, model.vocab, bias)


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
    ],
)
def test_invalid_arguments_raise_with_their_name(arguments, error, message):
    with pytest.raises(error, match=f"plan: {message}"):
        plan(*arguments)


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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "gpt", "--devices", "8"], "one of llama-3-8b"),
        (["--devices", "8"], "give either --model or all of --hidden, --vocab and --parameters"),
        (["--devices", "8", "--hidden", "8", "--vocab", "100"], "give either --model or all of"),
        (["--devices", "8", "--model", "llama-3-8b", "--hidden", "8"], "give either --model or all of"),
    ],
)
def test_the_command_reports_invalid_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_command_accepts_a_custom_shape(capsys):
    assert main(["--hidden", "64", "--vocab", "1000", "--parameters", "100000", "--devices", "4"]) == 0
    assert capsys.readouterr().out.strip() == str(plan(SHAPE, 4))
