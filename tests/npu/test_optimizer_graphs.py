"""Steps of FusedEmaAdam in captured NPU graphs, whose replays the host does not count."""

import functools
import os

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests._optim import assert_all_close, contents_of, each_flatten, step_with

pytestmark = [
    pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 captures in another way"),
    pytest.mark.skipif(os.environ.get("TASK_QUEUE_ENABLE") == "2", reason="torch_npu captures nothing with this queue"),
]
SCHEDULES = {"warm-up": {"ema_warmup": "ratio"}, "start": {"ema_start_step": 6}, "every": {"ema_update_every": 3}}
BEFORE, REPLAYS, AFTER = 2, 7, 3


@pytest.fixture(autouse=True)
def back_on_the_default_stream():
    yield
    torch.npu.set_stream(torch.npu.default_stream())


class Training:
    """Steps with constant gradients, for all parameters or only the first."""

    def __init__(self, flatten, dtype=torch.float32, **options):
        generator = torch.Generator().manual_seed(0)
        self.weights = [nn.Parameter(torch.randn(8, generator=generator).to("npu", dtype)) for _ in range(3)]
        self.gradients = [torch.randn(8, generator=generator).to("npu", dtype) for _ in self.weights]
        self.optimizer = FusedEmaAdam(self.weights, lr=1e-2, ema_decay=0.9, flatten=flatten, **options)

    def step(self, count=1, only_first=False):
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            weight.grad = None if only_first and weight is not self.weights[0] else gradient
        for _ in range(count):
            self.optimizer.step()

    def captured(self, only_first=False):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            self.step(only_first=only_first)
        return graph


def assert_same(replayed, plain):
    found, expected = ([one.cpu() for one in contents_of(each.optimizer)] for each in (replayed, plain))
    assert_all_close(found, expected, 1e-6)


@pytest.mark.parametrize("warmup_after", [None, "ratio"])
@pytest.mark.parametrize(
    ("flatten", "only_first"), [(True, False), (False, False), (False, True)], ids=["flattened", "all", "one of three"]
)
def test_replays_and_the_steps_after_them_continue_the_step_counts(flatten, only_first, warmup_after):
    replayed, plain = Training(flatten), Training(flatten)
    for training in (replayed, plain):
        training.step(BEFORE)
    graph = replayed.captured(only_first)
    for _ in range(REPLAYS):
        graph.replay()
    plain.step(REPLAYS, only_first)
    for training in (replayed, plain):
        training.optimizer.param_groups[0]["ema_warmup"] = warmup_after
        training.step(AFTER)
    steps = [int(plain.optimizer.state[weight]["step"]) for weight in plain.weights]
    assert steps == [12, *([5, 5] if only_first else [12, 12])]
    assert_same(replayed, plain)


@each_flatten
@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_a_captured_step_must_have_a_constant_decay(options, flatten):
    training = Training(flatten, **options)
    training.step()
    before = [weight.detach().clone() for weight in training.weights]
    [(name, value)] = options.items()
    with pytest.raises(RuntimeError, match=rf"must have a constant EMA decay.* group 0 has .*{name}={value!r}"):
        training.captured()
    assert_all_close([weight.detach() for weight in training.weights], before, 0)


def test_replays_of_a_compiled_step_continue_the_schedule():
    replayed, plain = Training(False, ema_warmup="ratio"), Training(False, ema_warmup="ratio")
    compiled = torch.compile(replayed.optimizer.step, backend="aot_eager")
    for training in (replayed, plain):
        training.step(BEFORE)
    compiled()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        compiled()
    replayed.step()
    for _ in range(REPLAYS):
        graph.replay()
    replayed.step(AFTER)
    plain.step(2 + REPLAYS + AFTER)
    assert_same(replayed, plain)


BEFORE_A_CAPTURE = {
    "nothing": lambda training: None,
    "a load": lambda training: (training.step(), training.optimizer.load_state_dict(training.optimizer.state_dict())),
    "new data": lambda training: (
        training.step(),
        setattr(training.weights[0], "data", training.weights[0].data.clone()),
    ),
    "a group": lambda training: (
        training.step(),
        training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, device="npu"))]}),
    ),
    "a first gradient": lambda training: training.step(only_first=True),
}


@each_flatten
@pytest.mark.parametrize("prepare", BEFORE_A_CAPTURE.values(), ids=BEFORE_A_CAPTURE)
def test_a_step_that_initializes_states_is_not_captured(prepare, flatten):
    training = Training(flatten)
    prepare(training)
    with pytest.raises(RuntimeError, match=r"captured step must not initialize states.* call step\(\) once before"):
        training.captured()


@each_flatten
def test_new_states_are_said_to_need_a_new_capture(flatten):
    training = Training(flatten)
    training.step()
    training.captured()
    warned = functools.partial(pytest.warns, UserWarning, match="graphs of earlier steps must be captured again")
    load = functools.partial(training.optimizer.load_state_dict, training.optimizer.state_dict())
    for call in (load, training.step):
        with warned() as warnings:
            call()
        assert warnings[0].filename == __file__


def test_a_flattened_graph_needs_the_gradients_of_all_its_parameters():
    training = Training(True)
    training.step()
    before = [weight.detach().clone() for weight in training.weights]
    with pytest.raises(RuntimeError, match="must have a gradient or none, but 1 of 3 have one"):
        training.captured(only_first=True)
    training.captured()
    with pytest.raises(RuntimeError, match="must have a gradient or none, but 1 of 3 have one"):
        training.step(only_first=True)
    assert_all_close([weight.detach() for weight in training.weights], before, 0)


@each_flatten
def test_a_replay_overwrites_what_a_program_has_written_to_a_16_bit_parameter(flatten):
    replayed, plain = (Training(flatten, dtype=torch.bfloat16) for _ in range(2))
    for training in (replayed, plain):
        training.step()
    graph = replayed.captured()
    replayed.weights[0].data.fill_(5)
    graph.replay()
    plain.step()
    assert_same(replayed, plain)


@each_flatten
def test_the_average_of_a_parameter_on_another_device_needs_no_gradient(flatten):
    weights = [nn.Parameter(torch.ones(4, device=device)) for device in ("npu", "npu", "cpu")]
    optimizer = FusedEmaAdam(weights, lr=0.1, ema_decay=0.5, flatten=flatten)
    step_with(optimizer)
    weights[1].grad = weights[2].grad = None
    optimizer.step()
    averages = [optimizer.state[weight]["ema_params"].cpu() for weight in weights[1:]]
    assert_all_close(averages, [torch.full((4,), 0.899 + 0.101 / 4)] * 2, 1e-6)
