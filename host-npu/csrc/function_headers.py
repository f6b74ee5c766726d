"""The functions of CANN that the libraries provide: a header for each operator, and the names that sources include."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent

_HEADER = """\
#pragma once

#include "aclnn/acl_meta.h"

extern "C" {{
ACLNN_API aclnnStatus {name}GetWorkspaceSize{parameters};
ACLNN_API aclnnStatus {name}(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);
}}
"""
# CANN's header names that do not follow from the function names.
_OTHER_NAMES = {"aclnnInplaceCopy": "aclnn_copy"}
_LIST_FORMULAS = """
import ctypes, sys, torch
function = ctypes.CDLL(sys.argv[1]).host_npu_arguments
function.restype = ctypes.c_char_p
print(function().decode(), end="")
"""


class BuildError(RuntimeError):
    """Raised with the reason if the host NPU cannot be compiled."""


def write_headers(include: Path, formulas: Path | None) -> None:
    """Write the headers of CANN that torch_npu's wheel lacks to a folder.

    Args:
        include: The folder; created if missing.
        formulas: The library whose operators get a header, too, if it can be loaded.

    Raises:
        BuildError: The library could not be loaded.
    """
    shutil.copytree(SOURCES / "include", include, dirs_exist_ok=True)
    declare(operators() | ({} if formulas is None else _of_formulas(formulas)), include)


def operators() -> dict[str, str]:
    """Return the parameters of phase one of each operator that ``opapi`` checks, by operator name."""
    text = "".join(source.read_text() for source in sorted((SOURCES / "opapi").glob("*.cpp")))
    found = re.findall(r"^HOST_NPU_PHASE_ONE (aclnn\w+)GetWorkspaceSize(\([^)]*\))", text, re.MULTILINE)
    return {name: " ".join(parameters.split()) for name, parameters in found}


def declare(functions: dict[str, str], include: Path) -> list[Path]:
    """Write a header for each function of CANN from the parameters of its phase one, and return the paths."""
    headers = []
    for name, parameters in functions.items():
        words = re.sub("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]|V[0-9])", "_", name).lower()
        target = include / "aclnnop" / f"{_OTHER_NAMES.get(name, words)}.h"
        headers.append(written(_HEADER.format(name=name, parameters=parameters), target))
    return headers


def _of_formulas(library: Path) -> dict[str, str]:
    """Return the parameters of phase one of each operator that a formula computes, by operator name."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", _LIST_FORMULAS, str(library)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise BuildError(f"the libraries cannot be loaded:\n{result.stderr}")
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


def two_phase_functions(folder: Path, prefix: str) -> list[str]:
    """Return the names of the two-phase functions that the libraries in a folder look up."""
    content = b"".join(file.read_bytes() for file in sorted(folder.glob("*.so")))
    # Not anchored at the start: any bytes may precede a string in a library.
    names = re.findall(rb"(" + prefix.encode() + rb"\w+?)GetWorkspaceSize(?=\0)", content)
    return sorted({name.decode() for name in names})


def written(content: str, target: Path) -> Path:
    """Write a file, unless it has this content already, and return its path."""
    if not target.exists() or target.read_text() != content:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    return target
