"""Steps of FusedEmaAdam in captured graphs of an NPU, whose replays the host does not count."""

import os

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests._optim import assert_all_close, states_of

pytestmark = [
    pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch_npu 2.9 captures in another way"),
    pytest.mark.skipif(os.environ.get("TASK_QUEUE_ENABLE") == "2", reason="torch_npu captures nothing with this queue"),
]
OPTIONS = {
    "constant": {},
    "warm-up": {"ema_warmup": "ratio"},
    "start": {"ema_start_step": 6},
    "every": {"ema_update_every": 3},
}
BEFORE, REPLAYS, AFTER = 2, 7, 3


@pytest.fixture(autouse=True)
def back_on_the_default_stream():
    yield
    torch.npu.set_stream(torch.npu.default_stream())


class Training:
    """Steps with constant gradients, of all parameters or only of the first."""

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


each_flatten = pytest.mark.parametrize("flatten", [True, False], ids=["flattened", "one by one"])


def assert_same(replayed, plain):
    found, expected = ([state.cpu() for state in states_of(each.optimizer)] for each in (replayed, plain))
    assert_all_close(found, expected, 1e-6)
    weights = ([weight.detach().cpu() for weight in each.weights] for each in (replayed, plain))
    assert_all_close(*weights, 1e-6)


@pytest.mark.parametrize("only_first", [False, True], ids=["all", "one of three"])
@each_flatten
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_replays_and_the_steps_after_them_continue_the_schedule(options, flatten, only_first):
    replayed, plain = Training(flatten, **options), Training(flatten, **options)
    for training in (replayed, plain):
        training.step(BEFORE)
    graph = replayed.captured(only_first)
    for _ in range(REPLAYS):
        graph.replay()
    plain.step(REPLAYS, only_first)
    for training in (replayed, plain):
        training.step(AFTER)
    steps = [int(plain.optimizer.state[weight]["step"]) for weight in plain.weights]
    assert steps == [12, *([5, 5] if only_first else [12, 12])]
    assert_same(replayed, plain)


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
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    with pytest.warns(UserWarning, match="graphs of earlier steps must be captured again"):
        training.step()


def test_a_flattened_graph_needs_the_gradients_of_all_or_none_of_its_parameters():
    training = Training(True)
    training.step()
    training.captured()
    before = [weight.detach().clone() for weight in training.weights]
    with pytest.raises(RuntimeError, match="must have a gradient or none, but 1 of 3 have one"):
        training.step(only_first=True)
    assert_all_close([weight.detach() for weight in training.weights], before, 0)


def test_replays_write_to_a_gradient_buffer_that_was_replaced_since_but_to_nobody_elses_memory():
    training = Training(True)
    for weight, gradient in zip(training.weights, training.gradients, strict=True):
        weight.grad = gradient.clone()
    training.optimizer.step()
    kept = [weight.grad for weight in training.weights]  # views of the buffer, so that the next step creates another
    buffer = kept[0].untyped_storage()
    graph = training.captured()
    training.step()
    address, size = buffer.data_ptr(), buffer.nbytes()
    del kept, buffer
    others = [torch.zeros(size // 4, device="npu") for _ in range(64)]
    assert address not in {other.untyped_storage().data_ptr() for other in others}
    graph.replay()
    assert not any(other.any() for other in others)


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
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    weights[1].grad = weights[2].grad = None
    optimizer.step()
    averages = [optimizer.state[weight]["ema_params"].cpu() for weight in weights[1:]]
    assert_all_close(averages, [torch.full((4,), 0.899 + 0.101 / 4)] * 2, 1e-6)
