"""Run a program with simulated NPUs: ``python -m host_npu train.py ...``."""

import argparse
import os
import runpy
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import host_npu
from host_npu import _operators


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m host_npu",
        usage="%(prog)s [options] (SCRIPT | -m MODULE | -c CODE) ...\n       %(prog)s [options] --list [NAME ...]",
        description="Run a Python program on the host NPU, a simulated Ascend NPU on the CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"host_npu {host_npu.__version__}")
    parser.add_argument("--devices", type=int, help="number of NPUs, 1 to 64 (default: HOST_NPU_DEVICES, or 1)")
    parser.add_argument("--soc", choices=host_npu.SOCS, help="the chip (default: HOST_NPU_SOC, or Ascend910B)")
    parser.add_argument(
        "--strict-memory",
        action="store_true",
        default=None,
        help="allocate exactly the requested size, to find accesses beyond it (or HOST_NPU_STRICT_MEMORY=1)",
    )
    parser.add_argument("--force", action="store_true", help="hide an installed CANN")
    parser.add_argument(
        "--list",
        action="store_true",
        help="list CANN's operators, or those with a NAME such as npu_rms_norm, with how each is simulated, and exit",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    kind.add_argument("-c", dest="code", action="store_true", help="SCRIPT is the program itself")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the program to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def _separated(arguments: list[str]) -> list[str]:
    """Split ``-mMODULE`` and ``-cCODE``, which Python also accepts, into two arguments."""
    takes_value = False
    for index, argument in enumerate(arguments):
        if takes_value:
            takes_value = False
        elif argument.startswith(("-m", "-c")) and len(argument) > 2:
            return [*arguments[:index], argument[:2], argument[2:], *arguments[index + 1 :]]
        elif not argument.startswith("--"):
            break
        else:
            takes_value = argument in ("--devices", "--soc")
    return arguments


def _is_safe() -> bool:
    """Return whether Python runs in safe-path mode; Python 3.10 has no such flag."""
    return getattr(sys.flags, "safe_path", False)


def _put_first(script: Path) -> None:
    """Put the script's folder first in ``sys.path``, instead of the working directory that ``-m`` put there."""
    if _is_safe():
        return
    del sys.path[0]
    # runpy does this for a folder or an archive.
    if not (script.is_dir() or zipfile.is_zipfile(script)):
        sys.path.insert(0, str(script.parent))


def _run_code(code: str) -> None:
    """Run code as ``python -c`` does: in a module ``__main__`` without a file."""
    sys.argv[0] = "-c"
    if not _is_safe():
        sys.path[0] = ""
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(module))


def _list(names: list[str]) -> int:
    """Print CANN's operators, all of them or those with some names, and return the exit status."""
    if not names:
        print(_operators.page(), end="")
        return 0
    status = 0
    for number, name in enumerate(names):
        lines = _operators.found(name, os.environ["HOST_NPU_SOC"])
        if not lines:
            status = 1
            function = name.rpartition(".")[2]
            lines = [
                f"torch_npu.{function}: not known here; call it on the host NPU to see whether it runs"
                if _operators.is_of_torch_npu(function)
                else f"{name}: torch_npu has no such function, and CANN no operator with this in its name"
            ]
        print(*[""] * (number > 0), *lines, sep="\n")
    return status


def main() -> None:
    """Enable the host NPU and run the program as Python would."""
    parser = _parser()
    arguments = parser.parse_args(_separated(sys.argv[1:]))
    if arguments.script is None and not arguments.list:
        parser.error("the following arguments are required: SCRIPT")
    script = Path(arguments.script or "")
    if not (arguments.list or arguments.module or arguments.code or script.exists()):
        parser.exit(2, f"{parser.prog}: error: there is no file {script}\n")
    # Import torch from the environment, not from the working directory, which Python has put first.
    current = [] if _is_safe() else [sys.path.pop(0)]
    try:
        host_npu.enable(arguments.devices, arguments.soc, arguments.force, arguments.strict_memory)
    except (host_npu.HostNpuError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if arguments.list:
        sys.exit(_list([name for name in (arguments.script, *arguments.arguments) if name is not None]))
    sys.path[:0] = current
    sys.argv = [arguments.script, *arguments.arguments]
    if arguments.code:
        _run_code(arguments.script)
        return
    if arguments.module:
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
        return
    _put_first(script.resolve())
    runpy.run_path(arguments.script, run_name="__main__")


if __name__ == "__main__":
    main()
