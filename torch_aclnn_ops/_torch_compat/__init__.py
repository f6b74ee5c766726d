"""Compatibility layer: all uses of private or version-dependent names of torch.

The package supports torch 2.9 to 2.14. ``public`` has the documented names that depend on the version; the other
modules have private names, grouped by the feature that needs them: ``derivatives``, ``modes`` (dispatch, autocast and
compilation), ``optimizer``, ``distributed`` and ``fsdp``.

Private names without a comment exist in all supported versions. If one is missing, only its feature is lost: the first
call that needs it raises a ``NotImplementedError`` that names both, or, if there is a fallback, :func:`lookup` warns
once during import and uses the fallback.
"""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

# Oldest and newest supported release, as in pyproject.toml.
OLDEST, NEWEST = (2, 9), (2, 14)
_NONE = object()


def _supported() -> str:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"{oldest} to {newest}"


def unsupported_version(reason: str = "") -> ImportError:
    """Return the error to raise for a torch that the package cannot be imported with."""
    return ImportError(
        f"torch_aclnn_ops needs torch {_supported()}, but torch {torch.__version__} is installed{reason};"
        f' pip install "torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"'
    )


if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
    raise unsupported_version()


class _Missing:
    """Placeholder for a missing private name, which raises when it is used."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def _raise(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(self._sentence)

    __call__ = __and__ = __getattr__ = _raise


def lookup(path: str, feature: str, fallback: Any = _NONE) -> Any:
    """Return a private name of torch.

    Args:
        path: The name, without ``torch.``.
        feature: The feature that needs it, for the message.
        fallback: Used with a warning if the name is missing; by default, an object that raises when used.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(_at(module), name)
    except (AttributeError, ImportError):
        sentence = _lacks(f"torch.{path}", feature)
    if fallback is _NONE:
        return _Missing(sentence)
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)
    return fallback


def attribute(owner: Any, name: str, feature: str) -> Any:
    """Return a private attribute of a torch object, or raise a ``NotImplementedError`` that names the feature."""
    found = getattr(owner, name, _NONE)
    if found is _NONE:
        raise NotImplementedError(_lacks(f"{type(owner).__name__}.{name}", feature))
    return found


@contextmanager
def needed_by(feature: str) -> Iterator[None]:
    """Turn a missing private name inside the block into a ``NotImplementedError`` that names the feature."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise NotImplementedError(_lacks(f"a name ({error})", feature)) from error


def _lacks(name: str, feature: str) -> str:
    return (
        f"torch_aclnn_ops: torch {torch.__version__} lacks {name}, which {feature} needs; torch {_supported()} have it"
    )


def _at(path: str) -> Any:
    found: Any = torch
    for depth, name in enumerate(path.split(".") if path else (), start=1):
        if not hasattr(found, name):
            importlib.import_module(".".join(("torch", *path.split(".")[:depth])))
        found = getattr(found, name)
    return found
