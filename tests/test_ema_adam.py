"""apply_fused_ema_adam_: the raw operator, against an evaluation of aclnnApplyFusedEmaAdam's formula in numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch_aclnn_ops import ops

import numpy as np
import pytest
import torch

from tests._contract import HALF_DTYPES, Maker

STATE = ("var", "m", "v", "s")
INF = float("inf")
OPTIONS = {"lr": 1e-2, "ema_decay": 0.99, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
OPTIONS |= {"weight_decay_mode": 1, "bias_correction": True, "weight_decay": 0.1}


def make_tensors(dtype, shape=(7, 5), seed=0):
    make = Maker(dtype, seed)
    normal = {name: make.normal(*shape) for name in ("grad", "var", "m", "s")}
    return {**normal, "v": make.probability(*shape)}


def run(tensors, step=7, **options):
    """Call the operator on copies; return the four states."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    step = step if isinstance(step, torch.Tensor) else torch.tensor(step)
    ops.apply_fused_ema_adam_(**copies, step=step, **{**OPTIONS, **options})
    return {name: copies[name] for name in STATE}


def assert_equal(tensors, expected):
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


def truth(
    grad, var, m, v, s, step, *, lr, ema_decay, beta1, beta2, eps, weight_decay_mode, bias_correction, weight_decay
):
    """Evaluate the formula in float64; the tensors are numpy arrays."""
    if weight_decay_mode == 0:
        grad = grad + weight_decay * var
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad
    m_hat = m / (1 - beta1**step) if bias_correction else m
    v_hat = v / (1 - beta2**step) if bias_correction else v
    update = m_hat / (np.sqrt(v_hat) + eps)
    if weight_decay_mode == 1:
        update = update + weight_decay * var
    var = var - lr * update
    s = ema_decay * s + (1 - ema_decay) * var
    return {"var": var, "m": m, "v": v, "s": s}


def true_states(tensors, step=7, **options):
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    with np.errstate(all="ignore"):
        states = truth(**arrays, step=step, **{**OPTIONS, **options})
    return {name: torch.from_numpy(np.asarray(state)) for name, state in states.items()}


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (7, 5)
    step: int = 7


CASES = [
    Case("decoupled decay"),
    Case("L2 decay", {"weight_decay_mode": 0}),
    Case("decoupled decay, no bias correction", {"bias_correction": False}),
    Case("L2 decay, no bias correction", {"weight_decay_mode": 0, "bias_correction": False}),
    Case("no decay", {"weight_decay": 0.0}),
    Case("first step", step=1),
    Case("step 10,000", step=10_000),
    Case("step 0 without bias correction", {"bias_correction": False}, step=0),
    Case("nothing remembered", {"beta1": 0.0, "beta2": 0.0, "ema_decay": 0.0}),
    Case("frozen average", {"ema_decay": 1.0}),
    Case("large eps", {"eps": 0.5}),
    Case("no eps", {"eps": 0.0}),
    Case("no learning", {"lr": 0.0}),
    Case("zero dimensions", shape=()),
    Case("no elements", shape=(0, 3)),
    Case("one element", shape=(1, 1, 1)),
    Case("odd shape", shape=(3, 1, 17, 2)),
    Case("nine dimensions", shape=(2,) * 9),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


# float64 and float32 round every operation in a chain of about ten; 16-bit dtypes round only the four results.
@pytest.mark.parametrize(
    "dtype, roundings", [(torch.float64, 4), (torch.float32, 4), *((dtype, 0.5 + 1e-3) for dtype in HALF_DTYPES)]
)
@each_case
def test_states_match_float64_up_to_rounding(case, dtype, roundings):
    tensors = make_tensors(dtype, case.shape)
    results = run(tensors, case.step, **case.options)
    truths = true_states(tensors, case.step, **case.options)
    for name in STATE:
        assert results[name].dtype == dtype and results[name].shape == case.shape
        error = (results[name].double() - truths[name]).abs()
        # Relative to the largest magnitude of the terms of a state, which may cancel in it.
        assert bool((error <= roundings * torch.finfo(dtype).eps * truths[name].abs().clamp(min=1)).all())


@pytest.mark.parametrize("beta2", [0.9, 0.999, 0.9999])
def test_the_first_bias_correction_avoids_cancellation_in_1_minus_beta(beta2):
    tensors = make_tensors(torch.float32) | {name: torch.zeros(7, 5) for name in STATE}
    result = run(tensors, step=1, beta2=beta2)["var"]
    expected = true_states(tensors, step=1, beta2=beta2)["var"]
    torch.testing.assert_close(result.double(), expected, rtol=8 * torch.finfo(torch.float32).eps, atol=0)


def test_the_average_of_constant_weights_equals_the_weights():
    tensors = make_tensors(torch.float32)
    tensors["s"] = tensors["var"].clone()
    for _ in range(100):
        tensors.update(run(tensors, lr=0.0, ema_decay=0.9999))
    assert torch.equal(tensors["s"], tensors["var"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("value", [INF, -INF, float("nan")])
@pytest.mark.parametrize("name", ["grad", *STATE])
def test_nonfinite_inputs_make_the_same_values_nonfinite(name, value, mode, dtype):
    tensors = make_tensors(dtype)
    tensors[name][0] = value
    results = run(tensors, weight_decay_mode=mode)
    for state, expected in true_states(tensors, weight_decay_mode=mode).items():
        torch.testing.assert_close(results[state], expected.to(dtype), equal_nan=True)


@pytest.mark.parametrize("weight, ema_decay", [(INF, 0.99), (-INF, 0.99), (INF, 0.0), (INF, 1.0), (1.0, 1.0)])
def test_an_infinite_average_follows_the_formula(weight, ema_decay):
    tensors = make_tensors(torch.float32)
    tensors["s"][:] = INF
    tensors["var"][:] = weight
    expected = true_states(tensors, ema_decay=ema_decay)["s"]
    torch.testing.assert_close(run(tensors, ema_decay=ema_decay)["s"], expected.float(), equal_nan=True)


# The example of CANN's documents: all five tensors are 1 ... 8. It fills the int64 step from floats, which are read as
# the first of these steps; the second is the intended one.
@pytest.mark.parametrize(
    "step, var, s",
    [
        (
            4_692_750_812_812_673_024,
            [0.9985, 1.997586, 2.99677, 3.996003, 4.995268, 5.994556, 6.993862, 7.993181],
            [0.99925, 1.998793, 2.998385, 3.998002, 4.997634, 5.997278, 6.996931, 7.996591],
        ),
        (
            10,
            [0.999347, 1.998783, 2.998235, 3.997694, 4.997158, 5.996626, 6.996096, 7.995568],
            [0.999673, 1.999392, 2.999117, 3.998847, 4.998579, 5.998313, 6.998048, 7.997784],
        ),
    ],
    ids=["as written", "as meant"],
)
def test_the_example_of_the_cann_documentation(step, var, s):
    values = torch.arange(1.0, 9.0).reshape(2, 2, 2)
    options = {"lr": 0.001, "ema_decay": 0.5, "weight_decay": 0.5}
    results = run(dict.fromkeys(("grad", *STATE), values), torch.full((2, 2), step), **options)
    expected = {"var": var, "m": range(1, 9), "v": [1, 2.002, 3.006, 4.012, 5.02, 6.03, 7.042, 8.056], "s": s}
    for name, numbers in expected.items():
        torch.testing.assert_close(results[name].flatten(), torch.tensor([*numbers]).float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_16_bit_states_are_the_float32_states_rounded_once(dtype):
    tensors = make_tensors(dtype, (1000,))
    unrounded = run({name: tensor.float() for name, tensor in tensors.items()})
    results = run(tensors)
    for name in STATE:
        assert torch.equal(results[name], unrounded[name].to(dtype))
    # An average of the rounded weights would differ, so the lines above detect which weights are averaged.
    average = torch.lerp(tensors["s"].float(), unrounded["var"].to(dtype).float(), 1 - 0.99)
    assert not torch.equal(results["s"], average.to(dtype))


VIEWS = {
    "transposed": lambda tensor: tensor.T,
    "every second row": lambda tensor: tensor[::2],
    "inner block": lambda tensor: tensor[1:-1, 1:-1],
    "one row stands for all": lambda tensor: tensor[:1].expand(4, -1),
}
IN_PLACE_VIEWS = [name for name in VIEWS if name != "one row stands for all"]


@pytest.mark.parametrize("view", IN_PLACE_VIEWS)
@pytest.mark.parametrize("name", STATE)
def test_a_state_may_be_a_view_and_the_rest_of_its_base_is_unchanged(name, view):
    storage = Maker(torch.float64, 1).probability(8, 8)
    before = storage.clone()
    state = VIEWS[view](storage)
    tensors = {**make_tensors(torch.float64, tuple(state.shape)), name: state}
    expected = run(tensors)[name]
    ops.apply_fused_ema_adam_(**tensors, step=torch.tensor(7), **OPTIONS)
    VIEWS[view](before).copy_(expected)
    assert torch.equal(storage, before)


@pytest.mark.parametrize("view", VIEWS)
def test_the_gradient_may_be_a_view(view):
    grad = VIEWS[view](Maker(torch.float64, 1).normal(8, 8))
    tensors = make_tensors(torch.float64, tuple(grad.shape))
    assert_equal(run({**tensors, "grad": grad}), run({**tensors, "grad": grad.contiguous()}))


@pytest.mark.parametrize(
    "step",
    [
        torch.tensor(7),
        torch.tensor([7]),
        torch.tensor([[7, 1], [2, 3]]),
        torch.tensor([7, 1]).expand(2, 2),
        torch.tensor([1, 7, 9])[1:],
    ],
    ids=lambda step: f"{list(step.shape)} with strides {step.stride()}",
)
def test_the_first_element_of_step_is_used_for_any_shape(step):
    tensors = make_tensors(torch.float64)
    assert_equal(run(tensors, step), run(tensors, 7))


@pytest.mark.parametrize("name", ["grad", "step"])
def test_it_does_not_write_to(name):
    arguments = {**make_tensors(torch.float64), "step": torch.tensor([7, 1])}
    before = arguments[name].clone()
    ops.apply_fused_ema_adam_(**arguments, **OPTIONS)
    assert torch.equal(arguments[name], before)


DOUBLE = torch.zeros(7, 5).double()
FLOAT = r"torch\.float32 as grad has, but it has torch\.float64"
SHAPE = r"grad\.shape = \[7, 5\], but its shape is \[5, 7\]"
NO_FLOAT = "grad must have a floating-point dtype, but it has"
ERROR_INPUTS = {
    **{
        f"gradient of {dtype}": ({"grad": torch.zeros(7, 5, dtype=dtype)}, TypeError, f"{NO_FLOAT} {dtype}")
        for dtype in (torch.int64, torch.complex64)
    },
    **{f"dtype of {name}": ({name: DOUBLE}, TypeError, f"{name} must have dtype {FLOAT}") for name in STATE},
    **{f"shape of {name}": ({name: DOUBLE.float().T}, ValueError, f"{name} must have shape {SHAPE}") for name in STATE},
    "dtype of step": (
        {"step": torch.tensor(7.0)},
        TypeError,
        r"step must have dtype torch\.int64, but it has torch\.float32",
    ),
    "no step": (
        {"step": torch.zeros(0, 2, dtype=torch.int64)},
        ValueError,
        r"step must have at least 1 element, but its shape is \[0, 2\]",
    ),
    **{
        f"step {step} with bias correction": (
            {"step": torch.tensor([step, 1])},
            ValueError,
            rf"step must be at least 1 with bias_correction \(increment it before the call\), but it is {step}",
        )
        for step in (0, -1)
    },
    **{
        f"mode {mode}": (
            {"weight_decay_mode": mode},
            ValueError,
            rf"weight_decay_mode must be 0 \(L2\) or 1 \(decoupled\), but it is {mode}",
        )
        for mode in (2, -1)
    },
}


@pytest.mark.parametrize("change, exception, sentence", ERROR_INPUTS.values(), ids=ERROR_INPUTS)
def test_it_raises_and_changes_nothing(change, exception, sentence):
    arguments = {**make_tensors(torch.float32), "step": torch.tensor(7), **OPTIONS, **change}
    before = {name: arguments[name].clone() for name in STATE}
    with pytest.raises(exception, match=f"^apply_fused_ema_adam_: {sentence}$"):
        ops.apply_fused_ema_adam_(**arguments)
    assert_equal({name: arguments[name] for name in STATE}, before)


@pytest.mark.parametrize("name", ["grad", *STATE])
def test_it_raises_if_a_gradient_is_required(name):
    tensors = make_tensors(torch.float32)
    tensors[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name} must not require grad or have a tangent"):
        ops.apply_fused_ema_adam_(**tensors, step=torch.tensor(7), **OPTIONS)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_accepts_parameters_under_no_grad(context):
    tensors = make_tensors(torch.float32)
    expected = run(tensors)
    parameter = torch.nn.Parameter(tensors["var"].clone())
    with context():
        ops.apply_fused_ema_adam_(**{**tensors, "var": parameter}, step=torch.tensor(7), **OPTIONS)
    assert torch.equal(parameter.detach(), expected["var"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize("shape", [(7, 5), (), (0, 3)])
def test_opcheck_passes(shape, dtype):
    tensors = make_tensors(dtype, shape)
    arguments = (*(tensors[name] for name in ("grad", *STATE)), torch.tensor(7))
    torch.library.opcheck(torch.ops.torch_aclnn_ops.apply_fused_ema_adam_.default, arguments, OPTIONS)


def test_it_compiles_without_a_graph_break():
    def step(grad, var, m, v, s, step):
        ops.apply_fused_ema_adam_(grad * 2, var, m, v, s, step + 1, **OPTIONS)
        return var * 2

    tensors = make_tensors(torch.float32)
    expected = run({**tensors, "grad": tensors["grad"] * 2}, 8)
    doubled = torch.compile(step, fullgraph=True, backend="aot_eager")(**tensors, step=torch.tensor(7))
    assert torch.equal(doubled, expected["var"] * 2)
    assert_equal({name: tensors[name] for name in STATE}, expected)


# Tensors that share memory with an output, made from the tensors of a call on any device.
SHARED = {
    "the same tensor twice": (lambda t: {"m": t["var"]}, "var and m must not share memory, because var is written to"),
    "overlapping views": (
        lambda t: {"m": t["buffer"][:35].view(7, 5), "v": t["buffer"][5:40].view(7, 5)},
        "m and v must not share memory, because m is written to",
    ),
    "the gradient": (lambda t: {"s": t["grad"]}, "s and grad must not share memory, because s is written to"),
    "an expanded tensor": (
        lambda t: {"m": t["buffer"][:5].expand(7, 5)},
        r"m must not have internal overlap, because it is written to, but it has shape \[7, 5\] and"
        r" strides \[0, 1\]",
    ),
}


def check_shared_memory_raises(change, sentence, device):
    """Assert that a call raises before anything is written."""
    tensors = {name: tensor.to(device) for name, tensor in make_tensors(torch.float32).items()}
    tensors.update(change({**tensors, "buffer": torch.ones(40, device=device)}))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError, match=f"apply_fused_ema_adam_: {sentence}"):
        ops.apply_fused_ema_adam_(**tensors, step=torch.tensor([7], device=device), **OPTIONS)
    assert_equal(tensors, before)


@pytest.mark.parametrize("change, sentence", SHARED.values(), ids=SHARED)
def test_shared_memory_raises_before_anything_is_written(change, sentence):
    check_shared_memory_raises(change, sentence, "cpu")
