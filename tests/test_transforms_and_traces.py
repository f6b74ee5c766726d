"""Losses under vmap in forward mode, which must find or refuse the tangents of constants, and traced and exported."""

from functools import partial

from torch_aclnn_ops import functional
from torch_aclnn_ops import functional as ours

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jvp, vmap

F64 = torch.float64
HEAD = torch.linspace(-1, 1, 28, dtype=F64).view(7, 4)
TARGET = torch.tensor([0, 6, 3, 3, 1])


ONES = torch.ones(5, 4, dtype=F64)
# By the name of the function: a function of a tensor to differentiate by, and a constant.
CASES = {
    "binary_cross_entropy": lambda x, weight: ours.binary_cross_entropy(x.sigmoid(), 0.3 * ONES, weight=weight),
    "dpo_loss": lambda x, one: ours.dpo_loss(x.sum(1), x.mean(1), one[:, 0], one[:, 1]),
    "kto_loss": lambda x, one: ours.kto_loss(x.sum(1), one[:, 0], TARGET > 2, 0.0),
    "grpo_loss": lambda x, old: ours.grpo_loss(x.log_softmax(-1), ONES[:, 0], ONES, old_log_probs=-old.exp()),
    "linear_kl_div": lambda x, one: ours.linear_kl_div(x, HEAD, teacher_probs=(one @ HEAD.T).softmax(-1)),
    "linear_cross_entropy": lambda x, weight: ours.linear_cross_entropy(
        x, HEAD, TARGET, weight=weight.sum(0).repeat(2)[:7].square()
    ),
}


def _tangent(function, point):
    return jvp(function, (point,), (torch.ones_like(point),))[1]


@pytest.mark.parametrize("name", CASES)
def test_a_batched_constant_without_a_tangent_equals_a_loop(name):
    loss, hidden, constants = CASES[name], torch.randn(5, 4, dtype=F64), torch.randn(3, 5, 4, dtype=F64)
    batched = _tangent(lambda hidden: vmap(partial(loss, hidden))(constants), hidden)
    looped = [_tangent(lambda hidden, one=one: loss(hidden, one), hidden) for one in constants]
    torch.testing.assert_close(batched, torch.stack(looped))


@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batched"])
@pytest.mark.parametrize("name", CASES)
def test_a_constant_with_a_tangent_raises(name, batch):
    loss, constants = partial(CASES[name], torch.randn(5, 4, dtype=F64)), torch.randn(*batch, 5, 4, dtype=F64)
    with pytest.raises(RuntimeError, match=f"{name}: .* a tangent"):
        _tangent(vmap(loss) if batch else loss, constants)


COMPILED = {
    **CASES,
    "mse_loss": ours.mse_loss,
    "embedding": lambda table, row: (ours.embedding(TARGET[2:], table) * row[0]).square().mean(),
    "in chunks": lambda x, weight: ours.linear_cross_entropy(x, HEAD, TARGET, token_weight=weight[:, 0], chunk_size=2),
}


@pytest.mark.parametrize("by", ["the input", "the constant"])
@pytest.mark.parametrize("name", COMPILED)
def test_a_tangent_in_compiled_code_is_that_of_finite_differences_or_refused(name, by):
    loss = COMPILED[name]
    points = torch.randn(5, 4, dtype=F64), torch.rand(5, 4, dtype=F64) + 0.5
    differentiated = points[by == "the constant"]
    direction = torch.randn_like(differentiated)

    def moved(point):
        return loss(*[point if one is differentiated else one for one in points])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def tangent(point):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(moved(forward_ad.make_dual(point, direction))).tangent

    if name in CASES and by == "the constant":
        with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{name}: .* a tangent"):
            tangent(differentiated)
        return
    step = 1e-6 * direction
    expected = (moved(differentiated + step) - moved(differentiated - step)) / 2e-6
    torch.testing.assert_close(tangent(differentiated), expected, rtol=1e-5, atol=1e-7)


pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)


def _rows(number):
    torch.manual_seed(number)
    return torch.rand(number, 3, requires_grad=True), torch.rand(number, 3)


def _labels(number):
    rows, head = torch.rand(number, 3, requires_grad=True), torch.rand(5, 3, requires_grad=True)
    return rows, head, torch.arange(number).remainder(5)


TRACED = {
    "mse_loss": (functional.mse_loss, _rows),
    "binary_cross_entropy": (functional.binary_cross_entropy, _rows),
    "embedding": (functional.embedding, lambda rows: (torch.arange(rows) % 4, torch.rand(4, 2, requires_grad=True))),
    "linear_cross_entropy": (functional.linear_cross_entropy, _labels),
    "linear_kl_div": (
        lambda rows, head, _: functional.linear_kl_div(rows, head, rows.detach() + 1, head.detach() * 2),
        _labels,
    ),
    "chunked": (lambda *args: functional.linear_cross_entropy(*args, chunk_size=2, label_smoothing=0.1), _labels),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_computes_the_same_for_any_number_of_rows(name):
    function, make = TRACED[name]
    traced = torch.jit.trace(function, make(4), check_trace=False)
    for number in (4, 7):
        inputs = make(number)
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        results = [each(*inputs) for each in (traced, function)]
        torch.testing.assert_close(*results)
        gradients = [torch.autograd.grad(result.sum(), leaves) for result in results]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("detached", [(), (0,), (0, 1)], ids=["that need all", "that need others", "that need none"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", TRACED)
def test_an_exported_call_has_the_gradients_of_the_call_whatever_it_was_exported_with(name, strict, detached):
    function, make = TRACED[name]
    inputs = make(4)

    class Call(torch.nn.Module):
        def forward(self, *arguments):
            return function(*arguments)

    examples = tuple(one.detach() if i in detached else one for i, one in enumerate(inputs))
    exported = torch.export.export(Call(), examples, strict=strict).module()
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    gradients = [torch.autograd.grad(each(*inputs).sum(), leaves) for each in (exported, function)]
    torch.testing.assert_close(*gradients)
