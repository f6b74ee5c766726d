"""The torch versions with which the package can be imported, and its behavior if torch lacks a name."""

import importlib
import inspect
import json
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops import _torch_compat, functional
from torch_aclnn_ops._torch_compat import public
from torch_aclnn_ops.functional.linear_cross_entropy import arguments

import pytest
import torch

from tests import _torchs as torchs
from tests._children import run_code

PACKAGE = Path(torch_aclnn_ops.__file__).parent


def test_the_versions_are_those_of_both_projects_and_the_pages():
    (first, oldest), (_, newest) = _torch_compat.OLDEST, _torch_compat.NEWEST
    stated = {
        "pyproject.toml": f'"torch>={first}.{oldest},<{first}.{newest + 1}"',
        "host-npu/setup.py": f"OLDEST, NEWEST = {_torch_compat.OLDEST}, {_torch_compat.NEWEST}\n",
        **dict.fromkeys(("README.md", "docs/install.md"), f"torch {first}.{oldest} to {first}.{newest}"),
        "docs/versions.md": f"to {first}.{newest},",
    }
    for path, text in stated.items():
        assert text in (PACKAGE.parent / path).read_text(), path


CHANGES = {
    "torch.__version__ = '2.8.0+cu126'": (
        'needs torch 2.9 to 2.14, but torch 2.8.0+cu126 is installed; pip install "torch>=2.9,<2.15"'
    ),
    "torch.__version__ = '2.15.0'; del torch._C._after_autograd_keyset": (
        "but torch 2.15.0 is installed, which lacks a required name (module 'torch._C' has no attribute "
        "'_after_autograd_keyset'"
    ),
    "torch.__version__ = '2.15.0.dev20270101'": None,
}
# Imports the package with each changed torch, which is imported once.
IMPORTS = f"""
import json, os, torch
for change in {list(CHANGES)!r}:
    if os.fork() == 0:
        try:
            exec(change)
            import torch_aclnn_ops
        except ImportError as error:
            print(json.dumps([change, str(error)]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def said():
    """Return the errors of importing the package with each changed torch."""
    result = run_code(IMPORTS, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return dict(map(json.loads, result.stdout.splitlines()))


@pytest.mark.parametrize("change", CHANGES)
def test_a_torch_that_does_not_fit_is_named(change, said):
    sentence = CHANGES[change]
    if sentence is None:
        assert change not in said
    else:
        assert said[change].startswith("torch_aclnn_ops needs") and sentence in said[change]


INPUT = torch.linspace(-1, 1, 6).reshape(2, 3)
HEAD = torch.linspace(1, 2, 12).reshape(4, 3)
TARGET = torch.tensor([1, 3])


needs_torchs = pytest.mark.skipif(not torchs.HAS_LINEAR_CROSS_ENTROPY, reason="torch has it since 2.13")


@needs_torchs
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"input": INPUT.double()},
        {"input": INPUT.sum()},
        {"input": INPUT.long(), "linear_weight": HEAD.long()},
        {"input": INPUT[0], "target": TARGET[0]},
        {"linear_weight": HEAD[0]},
        {"linear_weight": HEAD[:, :2]},
        {"linear_weight": HEAD.reshape(2, 2, 3)},
        {"linear_weight": HEAD.reshape(2, 2, 3), "target": TARGET[:, None].expand(2, 2) - 1},
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
    monkeypatch.setattr(arguments, "LinearCrossEntropyOptions", None)
    with pytest.raises(TypeError, match="options=.* requires torch 2.13 or newer"):
        functional.linear_cross_entropy(INPUT, HEAD, TARGET, options=object())


@needs_torchs
def test_the_fallback_base_module_has_torchs_constructor_state_and_representation():
    bases = (public._LinearCrossEntropyLoss, torch.nn.LinearCrossEntropyLoss)
    options = {"out_features": (2,), "bias": True, "weight": torch.ones(5), "label_smoothing": 0.1}
    mine, theirs = (base(3, 5, **options) for base in bases)
    assert repr(mine).partition("(")[2] == repr(theirs).partition("(")[2]
    theirs.load_state_dict(mine.state_dict())
    names = [list(inspect.signature(base.__init__).parameters) for base in bases]
    assert names[0] == names[1]
