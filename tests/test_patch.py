"""patch: torch's functions are replaced temporarily, and restored by the last patch."""

import copy
import inspect
import pickle
from unittest import mock

from torch_aclnn_ops import functional, nn, patch
from torch_aclnn_ops._checks import DROP_INS
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import EagerAndRecordGraphs

from tests.test_nn import MODULES

NAMES = [name for name in DROP_INS if hasattr(F, name)]
ORIGINALS = {name: getattr(F, name) for name in NAMES}
ADAMW = torch.optim.AdamW


def assert_is_torchs():
    assert {name: getattr(F, name) for name in NAMES} == ORIGINALS
    assert torch.optim.AdamW is ADAMW


@pytest.fixture(autouse=True)
def _is_undone():
    yield
    assert_is_torchs()


def test_functions_are_those_of_the_package_inside_and_torchs_again_after_an_exception():
    with pytest.raises(KeyError), patch():
        assert [getattr(F, name) for name in NAMES] == [getattr(functional, name) for name in NAMES]
        assert torch.optim.AdamW is ADAMW
        raise KeyError


def test_it_reports_what_it_replaces():
    names = tuple(f"torch.nn.functional.{name}" for name in NAMES)
    patched = patch(adamw=True)
    assert patched.replaced[: len(names) + 1] == (*names, "torch.optim.AdamW")
    others = dict.fromkeys(set(DROP_INS) - {"binary_cross_entropy"}, False)
    assert repr(patch(**others)) == "<patch of torch.nn.functional.binary_cross_entropy>"


def test_it_has_a_switch_for_every_drop_in_and_no_other():
    switches = inspect.signature(patch).parameters
    assert [name for name in switches if switches[name].default] == list(DROP_INS)
    message = r"^patch\(\) got an unexpected keyword argument 'mae_loss'; accepted are adamw, .*mse_loss"
    with pytest.raises(TypeError, match=message):
        patch(mae_loss=True)


@pytest.mark.parametrize("name", ["mse_loss", "adamw"])
def test_other_values_raise(name):
    sentence = f"^patch: {name} must be True(, False or a dict of options| or False), but it is 1"
    with pytest.raises(TypeError, match=sentence):
        patch(**{name: 1})


@pytest.mark.parametrize("name", [name for name in nn.__all__ if hasattr(torch.nn, name)])
def test_modules_of_torch_call_the_functions_of_the_package(name):
    _, options, inputs = next(module for module in MODULES if module[0] == name)
    module = getattr(torch.nn, name)(**options)
    expected = module(*inputs)
    functions = {name: getattr(functional, name) for name in NAMES}
    replacements = {name: mock.create_autospec(it, side_effect=it) for name, it in functions.items()}
    with mock.patch.multiple(functional, **replacements), patch():
        torch.testing.assert_close(module(*inputs), expected)
    assert sum(replacement.call_count for replacement in replacements.values()) == 1


_INTEGERS, _TABLE = torch.ones(2, dtype=torch.int64), torch.rand(3, 2)
LEFT_TO_TORCH = {
    "mse_loss": lambda: F.mse_loss(_INTEGERS, _INTEGERS, reduction="sum"),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(_TABLE, _TABLE.double()),
    "embedding": lambda: F.embedding(_INTEGERS, _TABLE.requires_grad_(), sparse=True).sum().backward(),
    "linear_cross_entropy": lambda: F.linear_cross_entropy(_TABLE[:2].to_sparse(), _TABLE, _INTEGERS),
}


@pytest.mark.parametrize("name", [name for name in LEFT_TO_TORCH if hasattr(F, name)])
def test_a_fallback_calls_torchs_original_function(name):
    def outcome():
        _TABLE.grad = None
        try:
            return str(LEFT_TO_TORCH[name]()), str(_TABLE.grad)
        except Exception as error:
            return type(error), str(error).splitlines()[0]

    expected = outcome()
    with patch():
        assert outcome() == expected


@pytest.mark.parametrize("name", NAMES)
def test_torch_function_overrides_get_torchs_original_function(name):
    class Overriding(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") == name:
                return function
            return super().__torch_function__(function, types, args, kwargs)

    tensor = torch.rand(2, 2).as_subclass(Overriding)
    with patch():
        parameters = inspect.signature(getattr(F, name)).parameters.values()
        needed = [tensor for parameter in parameters if parameter.default is parameter.empty]
        assert getattr(F, name)(*needed) is ORIGINALS[name]


def test_patches_end_in_reverse_order_and_restore_what_was_before_them():
    patches = [patch(), patch(mse_loss=False, adamw=True), patch(embedding=False, adamw={"ema_decay": 0.5})]
    for each in patches:
        each.start()
    for expected in (0.5, 0.9999, None):
        assert F.mse_loss is functional.mse_loss
        group = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).param_groups[0]
        assert group.get("ema_decay") == expected
        patches.pop().stop()


def test_another_order_raises_and_changes_nothing():
    first, last = patch().start(), patch(embedding=False).start()
    with pytest.raises(RuntimeError, match=r"is not the patch that began last; end <patch of .*> first$"):
        first.stop()
    assert [getattr(F, name) for name in NAMES] == [getattr(functional, name) for name in NAMES]
    last.stop()
    first.stop()


def test_a_patch_is_reentrant():
    patched = patch()
    with patched:
        with patched:
            pass
        assert F.mse_loss is functional.mse_loss


def test_functions_can_be_decorated_and_what_ends_later_raises():
    @patch()
    def function(add):
        return F.mse_loss, add

    assert function(add=1) == (functional.mse_loss, 1) and function.__name__ == "function"

    def generator():
        yield

    async def coroutine():
        pass

    for other in (generator, coroutine, object):
        with pytest.raises(TypeError, match="^patch: the decorated object must be a function that is neither"):
            patch()(other)


def test_stop_without_start_is_a_no_op():
    patched = patch()
    patched.stop()
    with patched:
        patched.stop()
        assert F.mse_loss is functional.mse_loss


def test_nested_patches_of_other_code_are_kept_and_undone():
    with patch():
        with mock.patch.object(F, "mse_loss", "theirs"):
            assert F.mse_loss == "theirs"
            with patch():
                assert F.mse_loss is functional.mse_loss
            assert F.mse_loss == "theirs"
        assert F.mse_loss is functional.mse_loss


@pytest.mark.parametrize("first", ["torch's", "patched"])
def test_compiled_code_is_recompiled(first):
    backend, input = EagerAndRecordGraphs(), torch.rand(3, requires_grad=True)
    compiled = torch.compile(lambda: torch.nn.MSELoss()(input, torch.ones(3)), backend=backend, fullgraph=True)
    if first == "torch's":
        compiled()
    with patch():
        compiled().backward()
        (gradient,) = torch.autograd.grad(ORIGINALS["mse_loss"](input, torch.ones(3)), input)
        torch.testing.assert_close(input.grad, gradient)
    compiled()
    graphs = [{node.target for node in graph.graph.nodes} for graph in backend.graphs]
    calls_torchs = [ORIGINALS["mse_loss"] in graph for graph in graphs]
    assert calls_torchs == ([True, False] if first == "torch's" else [False, True])


def test_code_that_is_patched_inside_can_be_compiled():
    input, seen = torch.rand(3), []

    @patch()
    def decorated(values):
        seen.append(F.mse_loss)
        return F.mse_loss(values, torch.ones(3))

    def with_block(values):
        with patch():
            return F.mse_loss(values, torch.ones(3))

    for function in (decorated, with_block):
        compiled = torch.compile(function, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(input), ORIGINALS["mse_loss"](input, torch.ones(3)))
            assert_is_torchs()
    assert seen == [functional.mse_loss] * 2


class TestAdamW:
    """torch.optim.AdamW replaced by FusedEmaAdam."""

    @pytest.mark.parametrize("arguments", [(), (1e-2, (0.8, 0.9), 1e-6, 0.1, False)], ids=["defaults", "all"])
    def test_it_accepts_torchs_arguments_and_performs_torchs_step(self, arguments):
        weights = [torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64)) for _ in range(2)]
        options = {"foreach": False, "capturable": False, "fused": None, "maximize": True, "differentiable": False}
        with patch(adamw={"ema_decay": 0.5}):
            mine = torch.optim.AdamW(weights[:1], *arguments, **options)
        theirs = torch.optim.AdamW(weights[1:], *arguments, **options)
        for _ in range(5):
            for weight in weights:
                weight.grad = weight.detach() ** 2
            mine.step()
            theirs.step()
        torch.testing.assert_close(*weights, rtol=1e-12, atol=0)
        assert isinstance(mine, FusedEmaAdam) and mine.param_groups[0]["ema_decay"] == 0.5

    @pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
    def test_unsupported_arguments_raise(self, name):
        weight = torch.nn.Parameter(torch.ones(1))
        for params, options in (([weight], {name: True}), ([{"params": [weight], name: True}], {})):
            with patch(adamw=True), pytest.raises(ValueError, match=f"^FusedEmaAdam: {name} must be False"):
                torch.optim.AdamW(params, **options)

    @pytest.mark.parametrize("name", ["fused", "foreach", "capturable", "momentum", "weight_decy", "flatten"])
    def test_a_group_has_the_keys_that_torchs_accepts(self, name):
        group = {"params": [torch.nn.Parameter(torch.ones(1))], name: True}
        with patch(adamw=True):
            assert torch.optim.AdamW([group]).param_groups[0][name] is True

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
    def test_a_copy_or_pickle_is_an_optimizer_of_the_package(self, clone):
        weight = torch.nn.Parameter(torch.ones(3))
        with patch(adamw={"ema_decay": 0.5}):
            optimizer = torch.optim.AdamW([weight], lr=0.1)
        weight.grad = torch.ones(3)
        optimizer.step()
        other = clone(optimizer)
        assert isinstance(other, FusedEmaAdam) and other.param_groups[0]["ema_decay"] == 0.5
        (state,) = other.state.values()
        assert torch.equal(state["ema_params"], optimizer.state[weight]["ema_params"])

    @pytest.mark.parametrize(
        "saved, given, is_adamw",
        [
            (torch.optim.Adam, True, True),
            (torch.optim.AdamW, True, True),
            (torch.optim.AdamW, {"decoupled_weight_decay": False}, False),
        ],
    )
    def test_it_stays_adamw_or_adam_whichever_state_it_loads(self, saved, given, is_adamw):
        weight = torch.nn.Parameter(torch.ones(3))
        with patch(adamw=given):
            optimizer = torch.optim.AdamW([weight])
        optimizer.load_state_dict(saved([weight], lr=0.1, weight_decay=0.5).state_dict())
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is is_adamw
