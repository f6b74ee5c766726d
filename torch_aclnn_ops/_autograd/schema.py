"""The arguments of an operator, as its schema names them."""

import ast
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Of "Tensor(a!)? softmax=None": the type, what is written to, whether it may be None, the name, the default.
_ARGUMENT = re.compile(r"(\w+)(?:\((\w!)\))?(\?)? (\w+)(?:=(.+))?")


@dataclass(frozen=True)
class Argument:
    """An argument of an operator.

    Attributes:
        name: in the schema.
        type: in the schema, such as ``"Tensor?"``, without what it says of writes.
        default: its default, or ``inspect.Parameter.empty``.
        is_keyword: it is given by name only.
        is_written: the operator writes to it.
    """

    name: str
    type: str
    default: Any
    is_keyword: bool
    is_written: bool


def arguments_of(schema: str) -> list[Argument]:
    """Return the arguments of a schema, ``name(type name, ...) -> type``."""
    arguments, is_keyword = [], False
    for part in schema.partition(" -> ")[0].partition("(")[2].removesuffix(")").split(", "):
        if part == "*":
            is_keyword = True
            continue
        found = _ARGUMENT.fullmatch(part)
        if found is None:
            raise ValueError(f"{schema}: {part!r} is no argument")
        kind, written, optional, name, default = found.groups()
        value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        arguments.append(Argument(name, kind + (optional or ""), value, is_keyword, written is not None))
    return arguments


def signature_of(arguments: Sequence[Argument]) -> inspect.Signature:
    """Return the same as a signature of Python, which makes Python's errors."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(one.name, kinds[one.is_keyword], default=one.default) for one in arguments]
    )
