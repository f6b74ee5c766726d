"""Public names and their signatures, and names in pickles, as stated in tests/public_api.txt: promises to users.

``python -m tests.test_public_api`` writes the file; changes of it belong in the changelog.
"""

import importlib
import inspect
import pickle
import pickletools
from pathlib import Path

from torch_aclnn_ops import functional, ops, optim, patch
from torch_aclnn_ops.integrations.transformers import patch_model

import pytest
import torch

from tests._language_models import make

FILE = Path(__file__).with_name("public_api.txt")
STATED = FILE.read_text().splitlines()
MODULES = [line.removeprefix("# ") for line in STATED if line.startswith("# ")]


def _signature(name: str, value: object) -> str:
    """Return the line of a name: the constructor of a class, or only the name if it is not callable."""
    if not callable(value):
        return name
    try:
        signature = inspect.signature(value)
    except ValueError:  # a C enumeration, or a builtin class
        return name
    # Without annotations, whose text depends on the versions of Python and torch; names, kinds and defaults do not.
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"


def _lines(module: str) -> list[str]:
    """Return the lines of a module: its names with their signatures; or schemas, or private names in pickles."""
    if module == "schemas":
        return [str(getattr(ops, name).overload._schema) for name in sorted(ops.__all__)]
    if module == "names in pickles":
        return _names_in_pickles()
    found = importlib.import_module(module)
    return [_signature(name, getattr(found, name)) for name in sorted(found.__all__)]


def _names_in_pickles() -> list[str]:
    """Return the names that a release needs to load this release's pickles."""
    model = patch_model(make())
    with patch(adamw=True):
        optimizers = torch.optim.AdamW(model.parameters()), optim.FusedEmaAdam(model.parameters(), ema_buffers=model)
    rows, labels = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    output = functional.linear_cross_entropy(rows, rows, labels, outputs=["logsumexp"])
    # In protocol 2, which torch.save uses, each name is one argument.
    operations = pickletools.genops(pickle.dumps((model, optimizers, output), protocol=2))
    names = {argument.replace(" ", ".") for one, argument, _ in operations if one.name == "GLOBAL"}
    return sorted(name for name in names if name.startswith("torch_aclnn_ops."))


@pytest.mark.parametrize("module", MODULES)
def test_a_public_module_has_the_stated_names_and_signatures(module):
    after = STATED[STATED.index(f"# {module}") + 1 :]
    end = next((place for place, line in enumerate(after) if line.startswith("# ")), len(after))
    assert _lines(module) == [line for line in after[:end] if line]


if __name__ == "__main__":
    FILE.write_text("\n\n".join("\n".join([f"# {module}", *_lines(module)]) for module in MODULES) + "\n")
