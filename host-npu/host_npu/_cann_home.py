"""A folder that programs accept as a CANN toolkit: links to headers and libraries, version files, and the tool npu-smi.

It is created in the user's cache when the host NPU is first enabled, because a wheel contains no links.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from host_npu import _libraries
from host_npu._version import __version__

# Distinguishes the folder from a real toolkit.
_MARK = "host_npu.info"
# Must equal the version of aclsysGetCANNVersion in csrc/ascendcl.
_CANN = "9.1.0"
# torch_npu checks for the last three.
_FOLDERS = ("include", "bin", "runtime", "compiler", "opp")
_SMI = Path(__file__).resolve().parent / "_npu_smi.py"


def is_own(home: str) -> bool:
    """Return whether a host NPU created the folder."""
    return os.path.exists(os.path.join(home, _MARK))


def variables(torch_npu: Path) -> dict[str, str]:
    """Create the folder, unless it exists, and return the environment variables that name it.

    Args:
        torch_npu: The folder of the installed torch_npu, whose headers are linked in addition to this package's.
    """
    home = _made(torch_npu)
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    tools = str(home / "bin")
    return {
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_TOOLKIT_HOME": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "PATH": os.pathsep.join([tools, *(path for path in paths if path != tools)]),
    }


def _made(torch_npu: Path) -> Path:
    links = (__version__, str(_libraries.FOLDER), str(torch_npu), sys.executable, Path(__file__).read_text())
    name = f"cann-{hashlib.sha256(os.fsencode(chr(0).join(links))).hexdigest()[:16]}"
    for parent in (_cache(), Path(tempfile.gettempdir()) / f"host_npu-{os.getuid()}"):
        home = parent / name
        if is_own(str(home)) and home.stat().st_uid == os.getuid():
            return home
        with contextlib.suppress(OSError):
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = Path(tempfile.mkdtemp(dir=parent))
            _fill(new, torch_npu)
            # Another process may have created it in the meantime.
            with contextlib.suppress(OSError):
                new.rename(home)
            shutil.rmtree(new, ignore_errors=True)
            return home
    raise OSError(f"no folder for the headers of CANN can be made in {_cache()} or {tempfile.gettempdir()}")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "host_npu"


def _fill(home: Path, torch_npu: Path) -> None:
    for name in _FOLDERS:
        (home / name).mkdir()
    (home / "lib64").symlink_to(_libraries.FOLDER)
    third_party = torch_npu / "include" / "third_party"
    headers = [
        entry
        for folder in (third_party / "acl" / "inc", third_party / "hccl" / "inc")
        if folder.is_dir()
        for entry in folder.iterdir()
    ]
    # HCCL's headers include one another by torch_npu's folder names.
    for entry in (third_party, *headers, *(_libraries.FOLDER / "include" / name for name in ("aclnn", "aclnnop"))):
        (home / "include" / entry.name).symlink_to(entry)
    (home / "version.info").write_text(f"Version={_CANN}\n")
    for name in ("compiler", "opp"):
        (home / name / "version.info").write_text(f"Version={_CANN}\nversion_dir={_CANN}\n")
    _fill_processor_folder(home)
    tool = home / "bin" / "npu-smi"
    # Without site packages: starts immediately, and simulates nothing.
    tool.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S '{_SMI}' \"$@\"\n")
    tool.chmod(0o755)
    (home / _MARK).touch()


def _fill_processor_folder(home: Path) -> None:
    """Create the folder, such as ``x86_64-linux``, with CANN's files for one processor and its version."""
    processor = platform.machine()
    folder = home / f"{processor}-linux"
    folder.mkdir()
    for name in ("include", "lib64"):
        (folder / name).symlink_to(Path("..") / name)
    lines = ("package_name=Ascend-cann-toolkit", f"version={_CANN}", f"arch={processor}", "os=linux")
    (folder / "ascend_toolkit_install.info").write_text("".join(f"{line}\n" for line in lines))
