"""Parse the arguments of an operator schema."""

import ast
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Groups for "Tensor(a!)? softmax=None": type, alias annotation, optional marker, name, default.
_ARGUMENT = re.compile(r"(\w+)(?:\((\w!)\))?(\?)? (\w+)(?:=(.+))?")


@dataclass(frozen=True)
class Argument:
    """An argument of an operator.

    Attributes:
        name: Its name in the schema.
        type: Its type, such as ``"Tensor?"``, without alias annotation.
        default: Its default, or ``inspect.Parameter.empty``.
        is_keyword: Whether it is keyword-only.
        is_written: Whether the operator modifies it in place.
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
            raise ValueError(f"{schema}: {part!r} is not a valid argument")
        kind, written, optional, name, default = found.groups()
        value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        arguments.append(Argument(name, kind + (optional or ""), value, is_keyword, written is not None))
    return arguments


def signature_of(arguments: Sequence[Argument]) -> inspect.Signature:
    """Return the Python signature of these arguments, whose ``bind`` raises Python's errors."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(one.name, kinds[one.is_keyword], default=one.default) for one in arguments]
    )
