"""The names of torch that are private, or not in every torch that is served; no other module has one.

Torch 2.9 to 2.14 are served. ``public`` has what is documented and depends on the version, the other modules have
private names by the feature that needs them: ``derivatives``, ``modes`` (of dispatch, autocast and compilation),
``optimizer``, ``distributed`` and ``fsdp``.

Private names without a remark are in all of these versions. A torch that lacks one loses the feature, not the package:
the first call that needs it raises a ``NotImplementedError`` that names both, or, where there is another way,
:func:`lookup` warns once, while the package is imported, and takes that.
"""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

# The first and the last release that the package is tested with, as in pyproject.toml.
OLDEST, NEWEST = (2, 9), (2, 14)
_NONE = object()


def _served() -> str:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"{oldest} to {newest}"


def unfit(reason: str = "") -> ImportError:
    """Return the error of a torch that the package cannot be imported with."""
    return ImportError(
        f"torch_aclnn_ops needs torch {_served()}, but torch {torch.__version__} is installed{reason};"
        f' pip install "torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"'
    )


if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
    raise unfit()


class _Missing:
    """Stands for a private name that torch lacks, and says so where it is used."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def _raise(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(self._sentence)

    __call__ = __and__ = __getattr__ = _raise


def lookup(path: str, feature: str, fallback: Any = _NONE) -> Any:
    """Return a private name of torch.

    Args:
        path: the name, after ``torch.``.
        feature: what needs it, for a sentence.
        fallback: what is used in its place, after a warning; by default, what raises when it is used.
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
    """Return a private attribute of an object of torch, or raise a sentence that names what needs it."""
    found = getattr(owner, name, _NONE)
    if found is _NONE:
        raise NotImplementedError(_lacks(f"{type(owner).__name__}.{name}", feature))
    return found


@contextmanager
def needed_by(feature: str) -> Iterator[None]:
    """Raise a sentence that names a feature where a private name is missing inside."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise NotImplementedError(_lacks(f"a name ({error})", feature)) from error


def _lacks(name: str, feature: str) -> str:
    return f"torch_aclnn_ops: torch {torch.__version__} lacks {name}, which {feature} needs; torch {_served()} have it"


def _at(path: str) -> Any:
    found: Any = torch
    for depth, name in enumerate(path.split(".") if path else (), start=1):
        if not hasattr(found, name):
            importlib.import_module(".".join(("torch", *path.split(".")[:depth])))
        found = getattr(found, name)
    return found
