"""With which torch the package can be imported, and what it does where one lacks a name."""

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops import _torch_compat, functional
from torch_aclnn_ops._torch_compat import fsdp, optimizer, public
from torch_aclnn_ops.functional.linear_cross_entropy import rules

import pytest
import torch

from tests import _torchs as torchs
from tests._children import run_python

PACKAGE = Path(torch_aclnn_ops.__file__).parent


def test_the_versions_match_those_of_both_projects():
    (oldest, newest) = _torch_compat.OLDEST, _torch_compat.NEWEST
    told = (PACKAGE.parent / "pyproject.toml").read_text()
    range_ = f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert re.search(rf'"torch{re.escape(range_)}"', told)
    assert f"OLDEST, NEWEST = {oldest}, {newest}\n" in (PACKAGE.parent / "host-npu/setup.py").read_text()


LOOKED_UP = ["_C._after_autograd_keyset", "_C._AutoDispatchBelowAutograd"]
REPLACED = {
    "transforms": [f"_C._functorch.{name}" for name in ("get_interpreter_stack", "is_functorch_wrapped_tensor")],
    "batches of gradients": ["_C._functorch.is_legacy_batchedtensor"],
    "forward mode": ["_C._is_fwd_grad_enabled"],
    "modes": [
        "_C._is_any_autocast_enabled",
        "_C._len_torch_dispatch_stack",
        "utils._python_dispatch._disable_current_modes",
    ],
    "lists": ["_foreach_add_", "_foreach_copy_", "_foreach_lerp_", "_fused_adam_", "_fused_adamw_"],
    "aliases": ["_C._storage_Use_Count"],
}
# Everything that a small training does, against numbers that torch found.
TRAINING = """
import warnings
from torch_aclnn_ops import functional as F, optim
weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
optimizer = optim.FusedEmaAdam([weight], lr=0.1)
target = torch.tensor([0, 1])
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = F.linear_cross_entropy(F.embedding(target, weight), weight, target) + F.mse_loss(weight, weight.detach() + 1)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("found", [round(loss, 4) for loss in losses])
print("batched", torch.func.vmap(torch.func.grad(F.mse_loss))(torch.ones(2, 2), torch.zeros(2, 2)).tolist())
"""


UNSUPPORTED = {
    "torch.__version__ = '2.8.0+cu126'": (
        'needs torch 2.9 to 2.14, but torch 2.8.0+cu126 is installed; pip install "torch>=2.9,<2.15"'
    ),
    "torch.__version__ = '1.13.1'": "needs torch 2.9 to 2.14, but torch 1.13.1 is installed",
    "torch.__version__ = '2.15.0'; del torch.library.register_vmap": (
        "but torch 2.15.0 is installed, which lacks a required name (cannot import name 'register_vmap'"
    ),
}
ACCEPTED = ["torch.__version__ = '2.15.0.dev20270101'", "torch.__version__ = '2.9.0a0+git1'"]
NEEDS_A_NAME = f"{TRAINING}\ntorch.ops.torch_aclnn_ops.mse_loss_backward(*[torch.ones(2)] * 3, 1)"
# Each program runs in a process of its own, forked from one that has imported torch: that takes longest.
FORKS = """
import json, os, sys, traceback, torch, torch._dynamo, torch.fx.experimental.proxy_tensor
for number, program in enumerate(json.load(sys.stdin)):
    if (child := os.fork()) == 0:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        try:
            exec(program, {"torch": torch})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)  # to end Python takes longer than the program
    os.waitpid(child, 0)
"""


def _lacking(*names: str) -> str:
    """Return the change of a torch that lacks names, which its own modules have taken before."""
    return "; ".join(f"del torch.{name}" for name in names)


PROGRAMS = {
    **{change: "" for change in (*UNSUPPORTED, *ACCEPTED)},
    **{_lacking(name): NEEDS_A_NAME for name in LOOKED_UP},
    **{_lacking(*names): TRAINING for names in ([], *REPLACED.values())},
}


@pytest.fixture(scope="module")
def said_after(tmp_path_factory) -> Callable[[str], tuple[str, str]]:
    """Return a function that returns what a program has said after a change of torch, and its errors."""
    folder = tmp_path_factory.mktemp("changed")
    programs = [f"{change}\nimport torch_aclnn_ops\n{program}" for change, program in PROGRAMS.items()]
    result = run_python("-c", FORKS, cwd=folder, input=json.dumps(programs), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
    files = [[(folder / f"{i}.{name}").read_text() for name in ("stdout", "stderr")] for i in range(len(programs))]
    return dict(zip(PROGRAMS, map(tuple, files), strict=True)).__getitem__


@pytest.mark.parametrize("change", UNSUPPORTED)
def test_an_unsupported_torch_raises_a_clear_error(change, said_after):
    *_, last = said_after(change)[1].strip().splitlines()
    assert last.startswith("ImportError: torch_aclnn_ops needs") and UNSUPPORTED[change] in last


@pytest.mark.parametrize("change", ACCEPTED)
def test_another_torch_is_accepted_if_it_has_the_names(change, said_after):
    assert "Error" not in said_after(change)[1]


@pytest.mark.parametrize("name", LOOKED_UP)
def test_without_a_private_name_only_calls_that_need_it_raise(name, said_after):
    said, errors = said_after(_lacking(name))
    lacks = f"torch_aclnn_ops: torch {torch.__version__} lacks torch.{name}, which torch.ops.torch_aclnn_ops needs; "
    assert "found" in said and errors.strip().splitlines()[-1].startswith(f"NotImplementedError: {lacks}")


@pytest.mark.parametrize("names", REPLACED.values(), ids=REPLACED)
def test_without_optional_private_names_the_package_warns_and_computes_the_same(names, said_after):
    said, errors = said_after(_lacking(*names))
    assert said == said_after("")[0] != "", errors
    for name in names:
        assert f"RuntimeWarning: torch_aclnn_ops: torch {torch.__version__} lacks torch.{name}, which" in errors


def test_a_feature_without_its_private_name_raises_when_it_is_used():
    lacks = f"^torch_aclnn_ops: torch {re.escape(torch.__version__)} lacks "
    missing = _torch_compat.lookup("_dynamo.no_such_name", "a feature")
    for use in (missing, lambda: missing.member, lambda: missing & 1):
        with pytest.raises(NotImplementedError, match=f"{lacks}torch._dynamo.no_such_name, which a feature needs; "):
            use()
    with pytest.raises(NotImplementedError, match=f"{lacks}GradScaler._per_optimizer_states, which a GradScaler needs"):
        optimizer.per_optimizer_state(type("GradScaler", (), {})(), None)
    with pytest.raises(NotImplementedError, match=f"{lacks}a name .*, which an optimizer of parameters that FSDP has"):
        fsdp.Fsdp1Unit(type("Module", (), {"_handle": None})())


INPUT = torch.linspace(-1, 1, 6).reshape(2, 3)
HEAD = torch.linspace(1, 2, 12).reshape(4, 3)
TARGET = torch.tensor([1, 3])


@pytest.mark.skipif(not torchs.HAS_LINEAR_CROSS_ENTROPY, reason="torch has a linear_cross_entropy since 2.13")
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"input": INPUT.double()},
        {"input": INPUT[None]},
        {"input": INPUT.sum()},
        {"input": INPUT.long(), "linear_weight": HEAD.long()},
        {"input": INPUT[0], "target": TARGET[0]},
        {"linear_weight": HEAD[0]},
        {"linear_weight": HEAD[:, :2]},
        {"linear_weight": HEAD.reshape(2, 2, 3)},
        {"linear_weight": HEAD.reshape(2, 2, 3), "target": TARGET[:, None].expand(2, 2) - 1},
        {"linear_weight": HEAD.reshape(2, 2, 3), "input": INPUT[0], "target": TARGET},
        {"linear_bias": HEAD[:, 0]},
        {"linear_bias": HEAD[:3, 0]},
        {"target": torch.full((2, 4), 0.25), "ignore_index": 1},
        {"target": TARGET[:1]},
        {"weight": HEAD[:3, 0]},
        {"reduction": "average"},
        {"label_smoothing": 1.5},
        {"ignore_index": 3},
    ],
    ids=lambda change: " and ".join(change) or "nothing",
)
def test_a_fallback_to_an_older_torch_behaves_like_a_newer_one(change, monkeypatch):
    call = {"input": INPUT, "linear_weight": HEAD, "target": TARGET, **change}
    monkeypatch.setattr(public, "linear_cross_entropy", None)
    module = importlib.import_module("torch_aclnn_ops.functional.linear_cross_entropy")  # not the function of its name
    monkeypatch.setattr(module, "is_left_to_torch", lambda _: True)
    if error := _error_of(torchs.functional.linear_cross_entropy, call):
        mine = _error_of(functional.linear_cross_entropy, call)
        assert issubclass(type(error), type(mine))
    else:
        assert torch.equal(functional.linear_cross_entropy(**call), torchs.functional.linear_cross_entropy(**call))


def _error_of(function, call):
    try:
        function(**call)
    except Exception as error:
        return error
    return None


def test_options_raise_if_torch_has_no_options_class(monkeypatch):
    monkeypatch.setattr(rules, "LinearCrossEntropyOptions", None)
    with pytest.raises(TypeError, match="options=.* requires torch 2.13 or newer"):
        functional.linear_cross_entropy(INPUT, HEAD, TARGET, options=object())


def test_the_fallback_base_module_has_torchs_constructor_state_and_representation():
    bases = (public._LinearCrossEntropyLoss, torchs.nn.LinearCrossEntropyLoss)
    mine, theirs = (
        base(3, 5, out_features=(2,), bias=True, weight=torch.ones(5), label_smoothing=0.1) for base in bases
    )
    assert repr(mine).partition("(")[2] == repr(theirs).partition("(")[2]
    theirs.load_state_dict(mine.state_dict())
    names = [list(inspect.signature(base.__init__).parameters) for base in bases]
    assert names[0] == names[1]


@pytest.mark.parametrize("options", [{"weight": torch.ones(4)}, {"label_smoothing": 1.5}], ids=str)
def test_the_fallback_base_module_raises_like_torchs(options):
    with pytest.raises(RuntimeError, match=f"LinearCrossEntropyLoss: {next(iter(options))} must"):
        public._LinearCrossEntropyLoss(3, 5, **options)
