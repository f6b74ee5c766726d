"""Compatibility layer: all uses of private or version-dependent names of torch.

The package supports torch 2.9 to 2.14. ``public`` has the documented names that depend on the version, ``private`` the
others. Names without a comment exist in all supported versions.
"""

import torch

# Oldest and newest supported release, as in pyproject.toml.
OLDEST, NEWEST = (2, 9), (2, 14)


def _unsupported_version(reason: str = "") -> ImportError:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return ImportError(
        f"torch_aclnn_ops needs torch {oldest} to {newest}, but torch {torch.__version__} is installed{reason};"
        f' pip install "torch>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}"'
    )


if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
    raise _unsupported_version()
try:
    from torch_aclnn_ops._torch_compat import private, public  # noqa: F401
except (AttributeError, ImportError) as error:
    raise _unsupported_version(f", which lacks a required name ({error})") from error
