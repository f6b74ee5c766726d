"""A copy of the repository, which is compiled with other settings."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECTS = (".", "host-npu")


def update(copy: Path) -> None:
    """Copy the files that git does not ignore, keeping their times, so that only changes are compiled again."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    files = {Path(name) for name in listed.stdout.split("\0") if name and (REPOSITORY / name).exists()}
    sources = "csrc/**/*.*", "host-npu/csrc/**/*.*", "**/tests/**/*.py", "torch_aclnn_ops/**/*.py"
    for pattern in (*sources, "benchmarks/**/*.*", "docs/**/*.*"):
        for old in copy.glob(pattern):
            if old.is_file() and old.relative_to(copy) not in files:
                old.unlink()
    for file in files:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / file, copy / file)


def build(copy: Path, instrument: str, projects: Sequence[str] = PROJECTS, **settings: str) -> dict[str, str]:
    """Compile all parts of projects in an updated copy and return the environment for programs there.

    Args:
        copy: The folder of the copy; created if missing.
        instrument: The value of ``TORCH_ACLNN_INSTRUMENT``, see ``setup.py``.
        projects: Their folders; the other project is used as installed.
        settings: Further environment variables.
    """
    update(copy)
    switches = {f"TORCH_ACLNN_{part}": "1" for part in ("NPU", "CPU")}
    folders = [copy / project for project in projects]
    environment = {**os.environ, **switches, **settings, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    for project in folders:
        subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
            cwd=project,
            env={**environment, "TORCH_ACLNN_INSTRUMENT": instrument, "HOST_NPU_INSTRUMENT": instrument},
            check=True,
        )
    return environment
