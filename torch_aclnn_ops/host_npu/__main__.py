"""Run a program with simulated NPUs: ``python -m torch_aclnn_ops.host_npu train.py ...``."""

import argparse
import runpy
import sys
from pathlib import Path

from torch_aclnn_ops import host_npu


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_aclnn_ops.host_npu",
        usage="%(prog)s [options] (SCRIPT | -m MODULE) ...",
        description="Run a Python program on simulated Ascend NPUs.",
        allow_abbrev=False,
    )
    parser.add_argument("--devices", type=int, help="number of NPUs (default: 1)")
    parser.add_argument("--soc", choices=host_npu.SOCS, help="the chip (default: Ascend910B)")
    parser.add_argument("--force", action="store_true", help="hide a real CANN")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the program to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def main() -> None:
    """Enable the host NPU and run the program as Python would."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        host_npu.enable(arguments.devices, arguments.soc, arguments.force)
    except (host_npu.HostNpuError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    sys.argv = [arguments.script, *arguments.arguments]
    if arguments.module:
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
        return
    # As for Python itself, the script's folder comes before all others.
    sys.path.insert(0, str(Path(arguments.script).resolve().parent))
    runpy.run_path(arguments.script, run_name="__main__")


if __name__ == "__main__":
    main()
