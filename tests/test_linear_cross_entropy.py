"""linear_cross_entropy: the drop-in and its Function."""

import re
from functools import partial

from torch_aclnn_ops import explain
from torch_aclnn_ops import functional as ours

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests import _torchs as torchs
from tests._contract import HALF_DTYPES, Case, DropInContract, Maker, assert_same_outcome, outcome
from tests._modes import LargestOfAll

N, H, C = 4, 2, 5


def _in_float32(F, input, *args, **options):
    """Call torch's function with our one stated difference: a float32 loss for 16-bit inputs."""
    loss = F.linear_cross_entropy(input, *args, **options)
    return loss.float() if loss.dtype in HALF_DTYPES else loss


def _input_and_head(make):
    return make.normal(N, H), make.normal(C, H)


def _indices(make):
    return (make.index(C, N),)


def _some_ignored(make):
    return (make.index(C, N).index_fill(0, torch.tensor([1, 3]), -100),)


def _class_weight(make):
    return make.index(C, N), make.probability(C)


def _call(**options):
    return lambda F, x, w, target: _in_float32(F, x, w, target, **options)


def _with_bias(**options):
    return lambda F, x, w, b, target: _in_float32(F, x, w, target, linear_bias=b, **options)


def _with_class_weight(**options):
    return lambda F, x, w, target, weight: _in_float32(F, x, w, target, weight=weight, **options)


def _input_head_and_bias(make):
    return *_input_and_head(make), make.normal(C)


def _with_probabilities(make):
    return *_input_and_head(make), make.normal(N, C).softmax(1)


FUSED_CASES = [
    Case("mean", _input_and_head, _call(), _indices),
    Case("none", _input_and_head, _call(reduction="none"), _indices),
    Case("ignored rows, mean", _input_and_head, _call(), _some_ignored),
    Case("ignored rows, none", _input_and_head, _call(reduction="none"), _some_ignored),
    Case("an ignored class", _input_and_head, _call(ignore_index=3), _indices),
    Case("class weights, mean", _input_and_head, _with_class_weight(), _class_weight),
    Case("class weights and an ignored class", _input_and_head, _with_class_weight(ignore_index=3), _class_weight),
    Case("one row without a batch", lambda m: (m.normal(H), m.normal(C, H)), _call(), lambda m: (m.index(C),)),
    Case(
        "not contiguous",
        lambda make: (make.normal(H, N), make.normal(C, 2 * H)),
        lambda F, x, w, target: _in_float32(F, x.T, w[:, ::2], target),
        _indices,
    ),
    Case("no rows", lambda m: (m.normal(0, H), m.normal(C, H)), _call(reduction="sum"), lambda m: (m.index(C, 0),)),
]

CHUNKED_CASES = [
    Case("bias", _input_head_and_bias, _with_bias(), _indices),
    Case("bias and ignored rows, none", _input_head_and_bias, _with_bias(reduction="none"), _some_ignored),
    Case("label smoothing", _input_and_head, _call(label_smoothing=0.2), _indices),
    Case("label smoothing and ignored rows", _input_and_head, _call(label_smoothing=0.2), _some_ignored),
    Case("label smoothing, sum", _input_and_head, _call(label_smoothing=1.0, reduction="sum"), _some_ignored),
    Case("label smoothing and class weights", _input_and_head, _with_class_weight(label_smoothing=0.3), _class_weight),
    Case("probabilities", _with_probabilities, lambda F, x, w, t: _in_float32(F, x, w, t)),
    Case("probabilities, none", _with_probabilities, lambda F, x, w, t: _in_float32(F, x, w, t, reduction="none")),
    Case(
        "probabilities with class weights and smoothing",
        lambda make: (*_with_probabilities(make), make.probability(C)),
        lambda F, x, w, t, weight: _in_float32(F, x, w, t, weight=weight, label_smoothing=0.1),
    ),
    Case(
        "probabilities of one row without a batch",
        lambda make: (make.normal(H), make.normal(C, H), make.normal(C).softmax(0)),
        lambda F, x, w, t: _in_float32(F, x, w, t),
    ),
]
POSITIONS = Case(
    "positions, left to torch",
    lambda make: (make.normal(N, H), make.normal(C, 2, 3, H), make.normal(C, 2, 3)),
    _with_bias(reduction="none"),
    lambda make: (make.index(C, N, 2, 3),),
)


# So few logits are computed in one chunk, and in 32 and 16 bits by torch's functions; all cases run in two chunks.
@pytest.mark.every_nth_case(3)
class TestFewLogits(DropInContract):
    CASES = [*FUSED_CASES, POSITIONS, *CHUNKED_CASES]
    ROUNDINGS = 4.0


def _in_chunks(case):
    """Make the same call with chunks of two rows if the module is ours."""

    def call(F, *tensors):
        return case.call(_TwoRowsAtATime if F is ours else F, *tensors)

    return Case(f"{case.name}, 2 rows at a time", case.inputs, call, case.constants)


class _TwoRowsAtATime:
    linear_cross_entropy = staticmethod(partial(ours.linear_cross_entropy, chunk_size=2))


class TestChunkSize(DropInContract):
    CASES = [_in_chunks(case) for case in (*FUSED_CASES, *CHUNKED_CASES)]
    ROUNDINGS = 4.0


_dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@st.composite
def calls(draw, batches=None, positions=((), (), (2,), (2, 1))):
    """Draw the arguments of a call, mostly valid ones; ``batches`` are shapes of rows that torch lacks."""

    def rarely(value, *others):
        return draw(st.sampled_from([value] * 12 + list(others)))

    dtype = draw(_dtypes)
    rows, features, classes = draw(st.integers(0, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    positions = draw(st.sampled_from(positions))
    batch = (rows,) if positions or draw(st.integers(0, 4)) else ()
    batch = batch if batches is None else draw(st.sampled_from(batches))
    make = Maker(dtype, draw(st.integers(0, 99)))
    input = make.normal(*batch, features).to(rarely(dtype, torch.float64, torch.int64))
    head = make.normal(rarely(classes, 0), *positions, rarely(features, features + 1))
    if draw(st.booleans()):
        shape = rarely((*batch, classes, *positions), (*batch, classes + 1, *positions))
        target = make.normal(*shape).softmax(0).to(rarely(dtype, torch.float64))
    else:
        target = make.index(classes, *rarely((*batch, *positions), (*batch, *positions, 1)))
        target = target + rarely(0, 1, -1, -100)
        target = target.to(rarely(torch.int64, torch.uint8, torch.int32, torch.float32))
    bias = make.normal(*rarely((classes, *positions), (classes + 1,))) if draw(st.booleans()) else None
    weight = make.probability(rarely(classes, classes + 1)) if draw(st.booleans()) else None
    weight = None if weight is None else weight.to(rarely(dtype, torch.float64))
    options = {
        "linear_bias": bias,
        "weight": weight,
        "reduction": rarely("mean", "sum", "sum", "none", "none", "none", "average"),
        "ignore_index": draw(st.sampled_from([None, None, None, -100, 0, 2, -1])),
        "label_smoothing": rarely(0.0, 0.1, 0.5, 1.0, -0.1, 1.1),
    }
    tensors = [tensor for tensor in (input, head, bias) if tensor is not None]
    if draw(st.integers(0, 9)) == 0 and weight is not None:
        tensors.append(weight)
    if target.is_floating_point() and draw(st.booleans()):
        tensors.append(target)
    return input, head, target, options, [tensor for tensor in tensors if tensor.is_floating_point()]


@given(call=calls())
def test_any_call_behaves_like_torchs(call):
    input, head, target, options, inputs = call
    weight = options["weight"]
    for tensor in inputs:
        tensor.requires_grad_()
    mine, theirs = (
        outcome(partial(function, input, head, target, **options), inputs)
        for function in (ours.linear_cross_entropy, partial(_in_float32, torchs.functional))
    )
    # PyTorch accepts uint8 targets, but some of its implementations fail for them, and errors print one as a character.
    if target.dtype is torch.uint8 and theirs[0] == "raised":
        assume(mine[0] == "raised" and "but found Byte" not in theirs[2])
        return
    if mine[0] == "returned" and mine[1].dtype in HALF_DTYPES:  # torch's own function computed the call
        mine = (mine[0], mine[1].float(), *mine[2:])
    if theirs[2:3] == (torchs.REFUSED,):
        mine = (*mine[:2], torchs.REFUSED, *mine[3:])
    if mine[0] == "raised" and "must have at least one class" in mine[2]:  # torch: nan or one of several errors
        assert head.shape[0] == 0
        return
    if mine[0] == "raised" and re.match("linear_cross_entropy: [a-z_]+ must ", mine[2]):
        # Accepted by torch: a negative label smoothing, a batch of one target, another dtype of a class weight.
        is_torchs = options["label_smoothing"] < 0 or (input.dim() == 1 and target.shape == (1,))
        is_torchs |= weight is not None and weight.dtype != head.dtype
        assert theirs[0] == "raised" or is_torchs, (mine, theirs)
        return
    if mine[1] is IndexError:  # the message begins like torch's
        mine = (*mine[:2], mine[2].partition(" linear_cross_entropy: ")[0], *mine[3:])
    tolerance = max([torch.finfo(tensor.dtype).eps for tensor in inputs] or [0]) * 64
    assert_same_outcome(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(5, C + 1), (6, C), (5, 1), (6,), (6, 6), (), (5, C, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_target_of_another_shape_raises_torchs_exception(shape, dtype):
    arguments = torch.ones(5, H), torch.ones(C, H), torch.zeros(shape, dtype=dtype)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        torchs.functional.linear_cross_entropy(*arguments)
    with pytest.raises(theirs.type, match="linear_cross_entropy: target must have shape") as mine:
        ours.linear_cross_entropy(*arguments)
    assert mine.type is theirs.type


def test_the_loss_of_many_bfloat16_rows_is_exact():
    # torch's chunked function sums this loss in bfloat16 and is off by a tenth or more.
    make = Maker(torch.bfloat16)
    input, head, target = make.normal(4096, 32), make.normal(2000, 32), make.index(2000, 4096)
    loss = ours.linear_cross_entropy(input, head, target)
    exact = torch.nn.functional.cross_entropy(input.double() @ head.double().T, target)
    assert abs(loss.item() - exact.item()) < 1e-5


@pytest.mark.parametrize("options", [{"chunk_size": 8}, {"chunk_size": 8, "label_smoothing": 0.1}], ids=str)
def test_gradients_of_many_chunks_are_rounded_to_16_bits_once(options):
    make = Maker(torch.bfloat16)
    input, head, bias, target = make.normal(2048, H), make.normal(C, H), make.normal(C), make.index(C, 2048)
    options = {"reduction": "sum", **options}

    def gradients(dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (head, bias)]
        loss = ours.linear_cross_entropy(input.to(dtype), leaves[0], target, linear_bias=leaves[1], **options)
        return torch.autograd.grad(loss, leaves)

    for gradient, truth in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        torch.testing.assert_close(gradient.double(), truth, rtol=2**-8, atol=1e-4)


def test_a_chunk_size_may_be_a_numpy_integer():
    input, head, target = torch.randn(N, H), torch.randn(C, H), torch.randint(C, (N,))
    loss = ours.linear_cross_entropy(input, head, target, chunk_size=numpy.int64(3))
    torch.testing.assert_close(loss, torchs.functional.linear_cross_entropy(input, head, target))


def test_uint8_targets_are_class_indices():
    input, head, target = torch.randn(N, H), torch.randn(C, H), torch.randint(C, (N,))
    loss = ours.linear_cross_entropy(input, head, target.byte())
    assert torch.equal(loss, ours.linear_cross_entropy(input, head, target))


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_a_compiled_call_shows_a_class_outside_the_head_as_nan(options, checks, monkeypatch):
    monkeypatch.setattr("torch_aclnn_ops._extension._checks_values", checks)
    # A traced value cannot be read, and a masked target would give a finite, wrong loss.
    call = torch.compile(partial(ours.linear_cross_entropy, **options), fullgraph=True, backend="aot_eager")
    assert call(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 4])).isnan()
    assert call(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 3])).isfinite()


@pytest.mark.skipif(not torchs.HAS_LINEAR_CROSS_ENTROPY, reason="torch has LinearCrossEntropyOptions since 2.13")
def test_torchs_options_are_accepted_and_their_chunk_size_is_used():
    make = Maker(torch.float32)
    input, head, target = *_input_and_head(make), make.index(C, N)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=3, chunking_method=None)
    assert "2 chunks of 3 rows" in explain(ours.linear_cross_entropy, input, head, target, options=options)
    loss = ours.linear_cross_entropy(input, head, target, options=options)
    torch.testing.assert_close(loss, ours.linear_cross_entropy(input, head, target))


@pytest.mark.skipif(not torchs.HAS_LINEAR_CROSS_ENTROPY, reason="torch has LinearCrossEntropyOptions since 2.13")
def test_torchs_options_are_passed_on_when_falling_back_to_torch():
    class Tagged(torch.Tensor):
        pass

    tensors = torch.rand(2, 3).as_subclass(Tagged), torch.rand(4, 3), torch.tensor([0, 1])
    options = torch.nn.LinearCrossEntropyOptions()
    with pytest.warns(UserWarning, match="``options`` ignored"):
        loss = ours.linear_cross_entropy(*tensors, options=options, label_smoothing=0.1)
    assert type(loss) is Tagged


def _hold_few_logits(monkeypatch, number):
    from torch_aclnn_ops.ops import _tiling as tiling

    monkeypatch.setattr(tiling, "LOGITS_BYTES", 4 * number)
    monkeypatch.setattr(tiling, "_FEWEST_ROWS", 8)
    monkeypatch.setattr(tiling, "_tile_rows_cached", tiling._tile_rows)


@pytest.mark.parametrize(
    ("options", "order"), [({}, 0), ({}, 1), ({}, 2), ({"label_smoothing": 0.1}, 2), ({"chunk_size": 64}, 2)], ids=str
)
def test_no_derivative_materializes_the_logits_of_all_rows(options, order, monkeypatch):
    _hold_few_logits(monkeypatch, 64 * 500)
    rows, classes = 1024, 500
    input, head = (torch.randn(shape, 8, requires_grad=True) for shape in (rows, classes))
    with LargestOfAll() as mode, torch.set_grad_enabled(order > 0):
        loss = ours.linear_cross_entropy(input, head, torch.randint(classes, (rows,)), **options)
        if order > 0:
            gradients = torch.autograd.grad(loss, (input, head), create_graph=order > 1)
        if order > 1:
            torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), (input, head))
    assert mode.elements < rows * classes / 4


def test_vmap_materializes_the_logits_of_one_chunk_per_sample(monkeypatch):
    _hold_few_logits(monkeypatch, 64 * 500)
    rows, classes, samples = 1024, 500, 3
    inputs, head = torch.randn(samples, rows, 8), torch.randn(classes, 8)
    targets = torch.randint(classes, (samples, rows))
    gradient = torch.func.grad(ours.linear_cross_entropy, argnums=(0, 1))
    with LargestOfAll() as mode:
        torch.vmap(gradient, (0, None, 0))(inputs, head, targets)
    assert mode.elements < samples * rows * classes / 4
