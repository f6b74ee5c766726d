"""Every operator of torch_npu runs or is refused by name, and the program continues.

The calls are made in a separate process, so that a crash is detected.
"""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from host_npu import _functions, _operators, testing
from tests._arguments import arguments_of

_SHAPES = (((4, 8), torch.float32), ((2, 4, 8, 16), torch.float16), ((16, 32), torch.float16), ((32,), torch.float32))
# torch_npu's own boxing of this operator dereferences a null pointer before it calls anything.
_CRASHES_IN_TORCH_NPU = {"atb::npu_multi_head_latent_attention.lse_out"}
# Messages of torch_npu and its loader for something missing, as opposed to refused.
_MISLEADING = re.compile("not in libopapi|upgrade CANN|Errno|Inner error|queue has ended|undefined symbol")


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        # Another refusal in the queue is raised by the next synchronization.
        if call is not torch.npu.synchronize:
            _error_of(torch.npu.synchronize)
        return f"{type(error).__name__}: {error}"
    return ""


def _goes_on() -> str:
    """Return the problem of a CPU operator or a CANN operator, or an empty string."""
    try:
        input = torch.ones(4, device="npu", requires_grad=True)
        torch.nn.functional.mse_loss(input, torch.zeros(4, device="npu")).backward()
        computed = [(input.detach() + 1).tolist(), input.grad.tolist()]
    except RuntimeError as error:
        return str(error)
    return "" if computed == [[2.0] * 4, [0.5] * 4] else f"computed {computed}"


def _all_operators() -> list[Any]:
    torch_npu.op_plugin.atb._atb_ops._register_atb_extensions()
    names = sorted({schema.name for schema in torch._C._jit_get_all_schemas()})
    packets = [
        getattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1])
        for name in names
        if name.startswith(("npu::", "atb::"))
    ]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def _call_all(device: str, folder: str) -> dict[str, tuple[str, str]]:
    """Return the error of each call, or an empty string, and the problem afterwards."""
    os.chdir(folder)  # some operators write files
    found = {}
    for operator in _all_operators():
        name = f"{operator._schema.name}.{operator._overloadname}"
        if name in _CRASHES_IN_TORCH_NPU:
            continue
        for number, (shape, dtype) in enumerate(_SHAPES):
            print(name, number, flush=True)  # the last line names the call that ended the process
            positional, named = arguments_of(operator, shape, dtype)
            call = functools.partial(operator, *positional, **named)
            found[f"{name} {number}"] = _error_of(call) or _error_of(torch.npu.synchronize), _goes_on()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, tuple[str, str]]:
    folder = str(tmp_path_factory.mktemp("folder"))
    return testing.run(_call_all, 1, folder, device="npu", devices=2, backend="")[0]


def test_every_operator_runs_or_raises_a_clear_error(found):
    misleading = {call: error for call, (error, _) in found.items() if _MISLEADING.search(error)}
    assert len(found) > 1000 and misleading == {}


def test_after_every_operator_others_compute_the_right_thing(found):
    wrong = {call: (error, after) for call, (error, after) in found.items() if after}
    assert wrong == {}


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("npu::npu_nsa_select_attention_infer", "aclnnNsaSelectedAttentionInfer"),
        ("npu::npu_all_to_all_matmul", "aclnnAlltoAllMatmul"),
        ("atb::npu_mla_preprocess", "ATB's AtbMLAPreprocess"),
    ],
)
def test_a_refusal_says_the_name(operator, name, found):
    errors = [error for call, (error, _) in found.items() if call.startswith(operator)]
    assert any(f"the host NPU does not simulate {name}" in error for error in errors)


def _functions_with(found: dict[str, tuple[str, str]], pattern: str) -> dict[str, set[str]]:
    """Return the matches of a pattern in the errors of each function."""
    matches: dict[str, set[str]] = {}
    for call, (error, _) in found.items():
        matches.setdefault(call.partition("::")[2].partition(".")[0], set()).update(re.findall(pattern, error))
    return {function: names for function, names in matches.items() if names}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other releases have functions of their own")
def test_the_list_knows_every_function_and_what_is_refused_of_it(found):
    functions = {call.partition("::")[2].partition(".")[0] for call in found}
    answers = {function: _operators.found(function) for function in functions}
    assert [function for function, lines in answers.items() if not lines] == []
    refused = _functions_with(found, r"the host NPU does not simulate (aclnn\w+)")
    refused = {function: {f"{name}: refused" for name in names} for function, names in refused.items()}
    for function in _functions_with(found, r"graph operator \(aclop\)"):
        refused.setdefault(function, set()).add(f"{function}: refused, a graph operator (aclop)")
    wrong = {function: lines for function, lines in refused.items() if not lines <= set(answers[function])}
    assert wrong == {}


def _boxes(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="npu")


def _integers(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype, device="npu")


# Valid calls of listed graph operators, whose functions refuse made-up arguments.
_CALLS = {
    "npu_conv3d": lambda f: f(_boxes(1, 4, 4, 4, 4), _boxes(2, 4, 2, 2, 2), None, [1] * 3, [0] * 3, [1] * 3, 1),
    "npu_convolution": lambda f: f(_boxes(1, 4, 4, 4), _boxes(2, 4, 2, 2), None, [1, 1], [0, 0], [1, 1], 1),
    "npu_grid_assign_positive": lambda f: f(
        *(_boxes(4), _boxes(2, 4), _boxes(4), _boxes(4), _integers(4), _boxes(2), _integers(2), 2, 0.0, 0.7, True)
    ),
    "npu_multi_head_attention": lambda f: f(
        *(_boxes(256, 256) for _ in range(6)),
        _boxes(16, 16, 16, 16),
        _boxes(256, 256),
        *(_boxes(256),) * 4,
        *(_integers(16, torch.uint8), 16, 16, 16, 16, 0.0, True),
    ),
    "npu_quant_conv2d": lambda f: f(
        _boxes(1, 16, 8, 8).char(),
        _boxes(16, 16, 3, 3).char(),
        _integers(16, torch.int64),
        [1, 1],
        [0, 0],
        [1, 1],
        output_dtype=torch.float16,
    ),
    "npu_random_choice_with_mask": lambda f: f(_integers(4, torch.bool), 2, 1, 0),
    "npu_rotated_iou": lambda f: f(_boxes(2, 18, 5), _boxes(2, 18, 5), False, 0, True, 0.0, 0.0),
    "npu_rotated_overlaps": lambda f: f(_boxes(2, 5, 18), _boxes(2, 5, 18), False),
    "npu_sign_bits_unpack": lambda f: f(_integers(2, torch.uint8), 1, torch.float32),
}


@pytest.mark.parametrize("function", _CALLS)
def test_a_graph_operator_is_refused_at_the_call_of_its_function(function):
    with pytest.raises(RuntimeError, match=r"does not simulate the graph operator \(aclop\)"):
        _CALLS[function](getattr(torch_npu, function))


def _is_for_programs(function: str) -> bool:
    return function.startswith("npu_") and not function.endswith(("_backward", "_fwd", "_grad"))


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is torch_npu 2.13's")
def test_the_functions_that_are_listed_as_graph_operators_are_those_that_are_refused_as_such(found):
    refused, running = set(), set()
    for call, (error, _) in found.items():
        # The shapes are made up, so torch_npu itself may refuse other calls.
        function = call.partition("::")[2].partition(".")[0]
        if "the graph operator (aclop) of" in error:
            refused.add(function)
        elif not error:
            running.add(function)
    listed = set(_functions.GRAPH_FUNCTIONS)
    assert listed - refused - _CALLS.keys() == set()
    assert set(filter(_is_for_programs, refused - running)) - listed == set()
