"""The torch and torch_npu versions that the compiled extensions were built for.

A C++ extension is only compatible with the release it was compiled for; with another one it may fail to load, or
compute wrong results. Each library therefore embeds these versions as text that can be read without loading it.
setup.py loads this file by its path, so it must not import anything from the package.
"""

import importlib.metadata
import mmap
from pathlib import Path

_MARK = "torch_aclnn_ops is compiled for "


def write_header(path: Path) -> Path:
    """Write the header that every source includes (``-include``), unless it is up to date."""
    versions = ", ".join(f"{name} {_installed(name)}" for name in ("torch", "torch_npu"))
    text = f'[[gnu::used]] static const char torch_aclnn_ops_built_for[] = "{_MARK}{versions}";\n'
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def incompatibility(library: Path, *packages: str) -> str | None:
    """Return why a library is incompatible with the installed versions of these packages, or ``None``."""
    built = _built_for(library)
    if built is None:
        return f"it does not record the versions it was compiled for; {_REMEDY}"
    installed = {name: _installed(name) for name in packages}
    needed = {name: built.get(name, "?") for name in packages}
    if needed == installed:
        return None
    verb = "is" if len(packages) == 1 else "are"
    return f"it was compiled for {_listed(needed)}, but {_listed(installed)} {verb} installed; {_REMEDY}"


_REMEDY = "install torch_aclnn_ops again with pip's --no-build-isolation"


def _listed(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())


def _installed(package: str) -> str:
    """Return the release of an installed package without local version: CPU and CUDA builds are compatible."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _built_for(library: Path) -> dict[str, str] | None:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(_MARK.encode())
        if start < 0:
            return None
        text = content[start : content.find(b"\0", start)].decode()
    name_and_version = (entry.split(" ") for entry in text.removeprefix(_MARK).split(", "))
    return {name: version for name, version in name_and_version}
