"""Operators that the host NPU computes with a formula, against the formula in float64, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch_npu
from tests._values import DTYPES, assert_gradients, assert_near, leaves
from torch import Tensor

_EPSILON = 1e-6
_Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Case:
    name: str
    operator: _Function
    reference: _Function
    shapes: tuple[tuple[int, ...], ...]
    # Whether torch_npu has a derivative.
    differentiable: bool = True
    # Whether the first result is rounded before the others are computed from it, which limits their precision.
    rounds_first: bool = False
    # Whether CANN supports 16-bit dtypes only.
    halves_only: bool = False


def _rms_norm(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    dims = tuple(range(-gamma.dim(), 0))
    rstd = (x.square().mean(dims, keepdim=True) + _EPSILON).rsqrt()
    return x * rstd * gamma, rstd


def _add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    y, rstd = _rms_norm(x1 + x2, gamma)
    return y, rstd, x1 + x2


def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, value = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * value


def _rotary_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _rotary_interleave(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def _layer_norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, _EPSILON)


def _with_moments(x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return _layer_norm(x, gamma, beta), mean, (variance + _EPSILON).rsqrt()


def _swish_of_group_norm(x: Tensor, gamma: Tensor, beta: Tensor, swish: float = 1) -> tuple[Tensor, ...]:
    normal = torch.nn.functional.group_norm(x, 4, gamma, beta, _EPSILON)
    groups = x.reshape(x.size(0), 4, -1)
    return normal * torch.sigmoid(normal * swish), groups.mean(-1), (groups.var(-1, correction=0) + _EPSILON).rsqrt()


def _geglu(x: Tensor, approximate: str, left: bool) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, -1)
    factor, activated = (second, first) if left else (first, second)
    gelu = torch.nn.functional.gelu(activated, approximate=approximate)
    return factor * gelu, gelu


def _rotated_pair(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return _rotary_half(query, cos, sin), _rotary_half(key, cos, sin)


def _in_place(operator: _Function, *inputs: Tensor) -> tuple[Tensor, ...]:
    x1, x2, *rest = (each.clone() for each in inputs)
    return x1, operator(x1, x2, *rest), x2


def _merged(*inputs: Tensor) -> Tensor:
    logs, results = torch.stack(inputs[:2]), torch.stack(inputs[2:])
    return (results * logs.softmax(0)[..., None]).sum(0)


_ANGLES = (2, 5, 4, 16), (1, 5, 1, 16), (1, 5, 1, 16)
_CASES = (
    _Case("rms_norm", lambda x, gamma: torch_npu.npu_rms_norm(x, gamma, _EPSILON), _rms_norm, ((3, 5, 64), (64,))),
    _Case(
        "rms_norm of two dimensions",
        lambda x, gamma: torch_npu.npu_rms_norm(x, gamma, _EPSILON),
        _rms_norm,
        ((3, 5, 64), (5, 64)),
    ),
    _Case(
        "add_rms_norm",
        lambda x1, x2, gamma: torch_npu.npu_add_rms_norm(x1, x2, gamma, _EPSILON),
        _add_rms_norm,
        ((3, 64), (3, 64), (64,)),
        differentiable=False,
        rounds_first=True,
    ),
    _Case(
        "gemma_rms_norm",
        lambda x, gamma: torch_npu.npu_gemma_rms_norm(x, gamma, _EPSILON),
        lambda x, gamma: _rms_norm(x, gamma + 1),
        ((3, 64), (64,)),
        differentiable=False,
    ),
    _Case(
        "add_layer_norm",
        lambda *x: torch_npu.npu_add_layer_norm(*x, _EPSILON, True),
        lambda x1, x2, *rest: (*_with_moments(x1 + x2, *rest), x1 + x2),
        ((3, 64), (3, 64), (64,), (64,)),
    ),
    _Case(
        "deep_norm",
        lambda x, gx, gamma, beta: torch_npu.npu_deep_norm(x, gx, beta, gamma, 0.3, _EPSILON)[::-1],
        lambda x, gx, gamma, beta: tuple(_with_moments(x * 0.3 + gx, gamma, beta)[index] for index in (0, 2, 1)),
        ((3, 64), (3, 64), (64,), (64,)),
    ),
    _Case(
        "group_norm_silu",
        lambda *x: torch_npu.npu_group_norm_silu(*x, 4, _EPSILON),
        _swish_of_group_norm,
        ((2, 8, 3, 5), (8,), (8,)),
        differentiable=False,
    ),
    _Case(
        "group_norm_swish",
        lambda x, gamma, beta: torch_npu.npu_group_norm_swish(x, 4, gamma, beta, _EPSILON, 1.5),
        lambda *x: _swish_of_group_norm(*x, 1.5),
        ((2, 8, 3, 5), (8,), (8,)),
    ),
    *[
        _Case(
            f"gelu, {approximate}",
            lambda x, by=approximate: torch_npu.npu_gelu(x, approximate=by),
            lambda x, by=approximate: torch.nn.functional.gelu(x, approximate=by),
            ((4, 9),),
        )
        for approximate in ("none", "tanh")
    ],
    *[
        _Case(
            f"geglu, {approximate}{', left' if left else ''}",
            lambda x, by=approximate, left=left: torch_npu.npu_geglu(x, -1, int(by == "tanh"), left),
            lambda x, by=approximate, left=left: _geglu(x, by, left),
            ((4, 3, 32),),
        )
        for approximate in ("none", "tanh")
        for left in (False, True)
    ],
    _Case(
        "add_rms_norm_v2",
        lambda *x: _in_place(lambda *own: torch_npu.npu_add_rms_norm_v2(*own, _EPSILON), *x),
        _add_rms_norm,
        ((3, 64), (3, 64), (64,)),
        differentiable=False,
        rounds_first=True,
    ),
    _Case(
        "apply_rotary_pos_emb",
        lambda *x: torch_npu.npu_apply_rotary_pos_emb(*[each.clone() for each in x], "BSND"),
        _rotated_pair,
        ((2, 5, 4, 128), (2, 5, 1, 128), (2, 5, 1, 128), (2, 5, 1, 128)),
        differentiable=False,
    ),
    _Case(
        "interleave_rope",
        torch_npu.npu_interleave_rope,
        lambda x, cos, sin: _rotary_half(torch.cat([x[..., ::2], x[..., 1::2]], -1), cos, sin),
        ((2, 4, 5, 64), (2, 1, 5, 64), (2, 1, 5, 64)),
        differentiable=False,
        halves_only=True,
    ),
    _Case(
        "masked_softmax_with_rel_pos_bias",
        lambda x, mask, bias: torch_npu.npu_masked_softmax_with_rel_pos_bias(x, mask, bias, 0.5),
        lambda x, mask, bias: (x * 0.5 + mask[:, None] + bias).softmax(-1),
        ((2, 3, 4, 16, 16), (3, 16, 16), (4, 16, 16)),
        differentiable=False,
    ),
    _Case(
        "masked_softmax_with_rel_pos_bias of joined windows",
        lambda x, mask, bias: torch_npu.npu_masked_softmax_with_rel_pos_bias(x, mask, bias, 0.5),
        lambda x, mask, bias: (x * 0.5 + mask.repeat(2, 1, 1, 1) + bias).softmax(-1),
        ((6, 4, 16, 16), (3, 1, 16, 16), (1, 4, 16, 16)),
        differentiable=False,
    ),
    _Case("fast_gelu", torch.ops.npu.fast_gelu, lambda x: x * torch.sigmoid(1.702 * x), ((4, 9),)),
    _Case("swiglu", lambda x: torch_npu.npu_swiglu(x, dim=-1), _swiglu, ((4, 3, 32),)),
    _Case(
        "swiglu of the first dimension", lambda x: torch_npu.npu_swiglu(x, dim=0), lambda x: _swiglu(x, 0), ((4, 8),)
    ),
    _Case("rotary_mul of halves", lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s), _rotary_half, _ANGLES),
    _Case(
        "rotary_mul of neighbours",
        lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, "interleave"),
        _rotary_interleave,
        _ANGLES,
    ),
)


def _inputs(case: _Case, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in case.shapes]


def _tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{dtype}-{case.name}")
        for case in _CASES
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if dtype != torch.float32 or not case.halves_only
    ],
)
def test_results_are_those_of_float64(case, dtype):
    inputs = _inputs(case, dtype)
    results = _tuple(case.operator(*[each.npu() for each in inputs]))
    expected = _tuple(case.reference(*[each.double() for each in inputs]))
    for actual, reference in zip(results, expected, strict=True):
        if case.rounds_first:
            assert_near(actual, reference, units=2, dtype=dtype)
        else:
            assert_near(actual, reference)


@pytest.mark.parametrize("case", [case for case in _CASES if case.differentiable], ids=lambda case: case.name)
@DTYPES
def test_gradients_are_those_of_float64(case, dtype):
    inputs = _inputs(case, dtype)
    on_npu, reference = leaves(*inputs)
    result, expected = _tuple(case.operator(*on_npu))[0], _tuple(case.reference(*reference))[0]
    assert_gradients(result, expected, on_npu, reference, units=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_add_rms_norm_cast_gives_its_result_twice(dtype):
    inputs = [torch.randn(shape).to(dtype) for shape in ((3, 64), (3, 64), (64,))]
    wide, *results = torch_npu.npu_add_rms_norm_cast(*[each.npu() for each in inputs], _EPSILON)
    assert wide.dtype == torch.float32 and wide.equal(results[0].float())
    for actual, reference in zip(results, _add_rms_norm(*[each.double() for each in inputs]), strict=True):
        assert_near(actual, reference, units=2, dtype=dtype)


@DTYPES
def test_attention_update_weighs_results_by_their_sums(dtype):
    inputs = [torch.randn(6), torch.randn(6), *(torch.randn(6, 16).to(dtype) for _ in range(2))]
    on_npu = [each.npu() for each in inputs]
    result, _ = torch_npu.npu_attention_update(on_npu[:2], on_npu[2:], 0)
    assert_near(result, _merged(*[each.double() for each in inputs]))


def test_strided_inputs_are_read_as_they_lie():
    x = torch.randn(32, 6)
    actual = torch_npu.npu_swiglu(x.npu().t(), dim=-1)
    assert_near(actual, _swiglu(x.t().double()))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: torch_npu.npu_rms_norm(torch.ones(2, 8).npu(), torch.ones(4).npu()), "gamma has shape"),
        (lambda: torch_npu.npu_swiglu(torch.ones(2, 8, dtype=torch.int32).npu()), "has dtype"),
        (lambda: torch_npu.npu_swiglu(torch.ones(2, 7).npu()), "cannot be halved"),
        (
            lambda: torch_npu.npu_add_rms_norm(torch.ones(2, 8).npu(), torch.ones(3, 8).npu(), torch.ones(8).npu()),
            "EZ1001: aclnnAddRmsNorm: x2 has shape",
        ),
    ],
    ids=["shapes", "dtypes", "odd sizes", "shapes that differ"],
)
def test_what_a_formula_does_not_take_is_refused_at_the_call(call, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        call()
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]


def _grouped_with(ends: list[int]) -> None:
    x, weight = torch.ones(4, 8).half().npu(), torch.ones(2, 8, 3).half().npu()
    torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=torch.tensor(ends).npu(), split_item=3, group_type=0, group_list_type=0
    )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: _grouped_with([4, 2]), "the ends of the groups must not decrease"),
        (
            lambda: torch_npu.npu_scatter_nd_update(
                torch.ones(4, 3).npu(), torch.tensor([[9]]).npu(), torch.ones(1, 3).npu()
            ),
            "index 9 is out of bounds for dimension 0 with size 4",
        ),
        (
            lambda: torch_npu.npu_cross_entropy_loss(torch.ones(2, 3).npu(), torch.tensor([0, 9]).npu()),
            "index 9 is out of bounds for dimension 1 with size 3",
        ),
    ],
    ids=["groups", "an index", "a target"],
)
def test_an_error_on_the_device_has_no_frames_of_the_host(call, sentence):
    stream = torch.npu.Stream()
    with (
        pytest.raises(RuntimeError, match=rf"failed on stream \d+ of device 0: {sentence}\n?$"),
        torch.npu.stream(stream),
    ):
        call()
        stream.synchronize()
