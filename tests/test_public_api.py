"""Public names and their signatures, as tests/public_api.txt states them: a line is a promise to users.

``python -m tests.test_public_api`` writes the file; what it changes belongs into the changelog.
"""

import importlib
import inspect
from pathlib import Path

from torch_aclnn_ops import ops

import pytest

FILE = Path(__file__).with_name("public_api.txt")
STATED = FILE.read_text().splitlines()
MODULES = [line.removeprefix("# ") for line in STATED if line.startswith("# ")]


def _signature(name: str, value: object) -> str:
    """Return the line of a name: a class is stated by its constructor, what cannot be called by its name alone."""
    if not callable(value):
        return name
    try:
        signature = inspect.signature(value)
    except ValueError:  # an enumeration of C, or a builtin class
        return name
    # Without annotations, whose text depends on the versions of Python and torch; names, kinds and defaults do not.
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"


def _lines(module: str) -> list[str]:
    """Return the lines of a module: its names with their signatures, or the schemas of the raw operators."""
    if module == "schemas":
        return [str(getattr(ops, name).overload._schema) for name in sorted(ops.__all__)]
    found = importlib.import_module(module)
    return [_signature(name, getattr(found, name)) for name in sorted(found.__all__)]


@pytest.mark.parametrize("module", MODULES)
def test_a_public_module_has_the_stated_names_and_signatures(module):
    after = STATED[STATED.index(f"# {module}") + 1 :]
    end = next((place for place, line in enumerate(after) if line.startswith("# ")), len(after))
    assert _lines(module) == [line for line in after[:end] if line]


if __name__ == "__main__":
    FILE.write_text("\n\n".join("\n".join([f"# {module}", *_lines(module)]) for module in MODULES) + "\n")
