"""The modules: drop-ins for torch.nn's in constructor, state and result."""

import copy
import inspect
import warnings

from torch_aclnn_ops import functional, nn

import pytest
import torch

INPUT = torch.linspace(0.1, 0.9, 12).reshape(4, 3)
TARGET = torch.linspace(0.8, 0.2, 12).reshape(4, 3)
INDICES = torch.tensor([0, 4, 2, 2])

TABLE, HEAD = {"num_embeddings": 5, "embedding_dim": 3}, {"in_features": 3, "num_classes": 5}
LOSS_OPTIONS = ({}, {"reduction": "none"}, {"reduction": "sum"}, {"size_average": False})


def _arguments(function):
    """Return the names of the arguments without a default."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def _taking(*arguments):
    """Return the names of modules that are constructed without arguments and called with these."""
    modules = {name: getattr(nn, name) for name in nn.__all__}
    of_call = {name: _arguments(one.forward) for name, one in modules.items() if not _arguments(one.__init__)}
    return [name for name, names in of_call.items() if names == list(arguments)]


# Modules that torch.nn lacks are covered by the tests of their functions.
DROP_INS = [name for name in nn.__all__ if hasattr(torch.nn, name)]

_MODULES = [
    *((name, options, (INPUT, TARGET)) for name in _taking("input", "target") for options in LOSS_OPTIONS),
    *((name, {}, (INPUT,)) for name in _taking("input")),
    ("BCELoss", {"weight": torch.tensor([1.0, 2.0, 3.0]), "reduction": "none"}, (INPUT, TARGET)),
    ("Embedding", TABLE, (INDICES,)),
    ("Embedding", {**TABLE, "padding_idx": -1, "max_norm": 1.0}, (INDICES,)),
    ("Embedding", {**TABLE, "scale_grad_by_freq": True}, (INDICES,)),
    ("LinearCrossEntropyLoss", HEAD, (INPUT, INDICES)),
    (
        "LinearCrossEntropyLoss",
        {**HEAD, "bias": True, "weight": torch.arange(1.0, 6), "ignore_index": 0, "label_smoothing": 0.1},
        (INPUT, INDICES),
    ),
    (
        "LinearCrossEntropyLoss",
        {**HEAD, "out_features": (2,), "bias": True, "reduction": "none"},
        (INPUT, INDICES.unsqueeze(1).expand(4, 2)),
    ),
]
MODULES = [module for module in _MODULES if module[0] in DROP_INS]


def test_every_module_is_in_the_table():
    assert {name for name, _, _ in _MODULES} == set(nn.__all__) - {"LinearKLDivLoss"}


@pytest.fixture(params=MODULES, ids=lambda entry: f"{entry[0]}, {', '.join(entry[1])}")
def pair(request):
    """Return the module and torch's own, with the same state."""
    name, options, inputs = request.param
    modules, messages = [], []
    for namespace in (nn, torch.nn):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            modules.append(getattr(namespace, name)(**options))
        messages.append([str(warning.message) for warning in caught])
    assert messages[0] == messages[1]
    mine, theirs = modules
    return mine, theirs, inputs


def test_it_is_an_instance_of_torchs_module_with_the_same_state_dict(pair):
    mine, theirs, _ = pair
    assert isinstance(mine, type(theirs))
    assert repr(mine) == repr(theirs)
    theirs.load_state_dict(mine.state_dict())


def test_result_and_gradients_equal_torchs(pair):
    mine, theirs, inputs = pair
    results = [module(*inputs) for module in (mine, theirs)]
    torch.testing.assert_close(*results)
    for result in results:
        if result.requires_grad:
            result.sum().backward()
    for parameter, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_it_can_be_deepcopied(pair):
    mine, _, inputs = pair
    torch.testing.assert_close(copy.deepcopy(mine)(*inputs), mine(*inputs))


@pytest.mark.parametrize("name", DROP_INS)
def test_the_constructor_has_torchs_arguments_and_the_functions_further_options(name):
    mine, theirs = (inspect.signature(getattr(module, name).__init__).parameters for module in (nn, torch.nn))
    of_torch, *both = ([(one.name, one.kind, one.default) for one in each.values()] for each in (theirs, mine))
    assert both[0][: len(theirs)] == of_torch
    further = list(mine)[len(theirs) :]
    if name == "LinearCrossEntropyLoss":
        # The others belong to a call: token_weight and outputs are arguments of forward.
        of_function = set(inspect.signature(functional.linear_cross_entropy).parameters)
        assert set(further) <= of_function and "softcap" in further
    else:
        assert not further


def test_an_embedding_can_be_created_from_pretrained():
    table = torch.arange(6.0).reshape(3, 2)
    embedding = nn.Embedding.from_pretrained(table, padding_idx=0)
    assert isinstance(embedding, nn.Embedding) and not embedding.weight.requires_grad
    assert embedding(torch.tensor([2])).tolist() == [[4.0, 5.0]]


def test_a_linear_cross_entropy_shows_its_options_and_loads_older_pickles_without_them():
    module = nn.LinearCrossEntropyLoss(4, 9, softcap=3.0)
    assert "softcap=3.0" in repr(module) and "temperature" not in repr(module)
    older = nn.LinearCrossEntropyLoss(4, 9)
    for name in ("softcap", "lse_square_scale", "temperature", "shift", "zero_if_all_ignored", "chunk_size"):
        del older.__dict__[name]  # like a pickle from before these attributes existed
    assert copy.deepcopy(older)(torch.zeros(2, 4), torch.tensor([1, 2])).isfinite()


def test_a_linear_cross_entropy_supports_token_weights_and_outputs():
    module = nn.LinearCrossEntropyLoss(4, 9)
    result = module(torch.randn(2, 4), torch.tensor([1, 2]), token_weight=torch.ones(2), outputs=("entropy",))
    assert result.entropy.shape == (2,)


@pytest.mark.parametrize("positions", [(), (2,)], ids=["plain", "K-dimensional"])
def test_a_linear_cross_entropy_returns_logits_in_eval_without_a_target(positions):
    options = {} if positions else {"softcap": 2.0, "temperature": 0.5}
    module = nn.LinearCrossEntropyLoss(4, 9, out_features=positions, bias=True, **options).eval()
    input, target = torch.randn(3, 4), torch.arange(3 * (2 if positions else 1)).reshape(3, *positions)
    logits = module(input)
    assert logits.shape == (3, 9, *positions)
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logits, target), module(input, target))


def test_a_linear_cross_entropy_without_a_target_raises_in_training_and_with_options_that_need_one():
    module = nn.LinearCrossEntropyLoss(4, 9)
    with pytest.raises(ValueError, match=r"^LinearCrossEntropyLoss: target must not be None in training mode"):
        module(torch.rand(2, 4))
    with pytest.raises(ValueError, match="target must not be None with token_weight, outputs or process_group"):
        module.eval()(torch.rand(2, 4), outputs=("entropy",))
    with pytest.raises(ValueError, match="target must not be None with token_weight, outputs or process_group"):
        module(torch.rand(2, 4), process_group=object())


def test_a_linear_cross_entropy_shifts_labels():
    module, input = nn.LinearCrossEntropyLoss(4, 9, shift=True), torch.rand(1, 3, 4)
    expected = torch.nn.functional.cross_entropy(module.eval()(input)[0, :-1], torch.tensor([5, 6]))
    torch.testing.assert_close(module(input, torch.tensor([[1, 5, 6]])), expected)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nn.LinearCrossEntropyLoss(3, 5, reduction="avg"), ValueError, "reduction must be one of .*'avg'"),
        (lambda: nn.LinearCrossEntropyLoss(3, 5, softcap=-1.0), ValueError, "softcap must be positive.*-1.0"),
        (lambda: nn.LinearCrossEntropyLoss(3, 5, temperature=0.0), ValueError, "temperature must be positive.*0.0"),
        (lambda: nn.LinearCrossEntropyLoss(3, 5, lse_square_scale=-2.0), ValueError, "lse_square_scale .*-2.0"),
        (lambda: nn.LinearCrossEntropyLoss(3, 5, shift="1"), TypeError, "shift must be a bool or an int.*'1'"),
        (lambda: nn.LinearKLDivLoss(shift=-1), ValueError, "shift must be at least 0.* -1"),
        (lambda: nn.LinearCrossEntropyLoss(3, 5, chunk_size=0), ValueError, "chunk_size must be at least 1.* 0"),
        (lambda: nn.LinearCrossEntropyLoss(3, 5, chunk_size="all"), TypeError, "chunk_size must be .*'all'"),
        (lambda: nn.LinearCrossEntropyLoss(3, 5, zero_if_all_ignored="no"), TypeError, "zero_if.* be a bool.*'no'"),
        (lambda: nn.LinearKLDivLoss(zero_if_all_ignored=None), TypeError, "zero_if_all_ignored must be a bool.*None"),
        (lambda: nn.LinearKLDivLoss(max_memory=0), ValueError, "max_memory must be at least 1.* 0"),
        (lambda: nn.LinearKLDivLoss(beta=1.5), ValueError, "beta must be at least 0 and at most 1.*1.5"),
        (lambda: nn.LinearKLDivLoss(vocab_size=0), ValueError, "vocab_size must be at least 1.* 0"),
        (lambda: nn.LinearKLDivLoss(temperature="hot"), TypeError, "temperature must be a number.*'hot'"),
        (lambda: nn.LinearKLDivLoss(reduction="avg"), ValueError, "reduction must be one of .*'avg'"),
        (lambda: nn.LinearKLDivLoss("forward"), ValueError, "divergence must be one of .*'forward'"),
    ],
)
def test_an_invalid_option_of_a_loss_on_a_head_raises_in_its_constructor(make, error, message):
    with pytest.raises(error, match=rf"^Linear(CrossEntropy|KLDiv)Loss: {message}"):
        make()
