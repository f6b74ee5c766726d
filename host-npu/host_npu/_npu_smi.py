"""The tool ``npu-smi`` of the host NPU: the simulated devices, as ``npu-smi info`` lists those of a machine.

It is run without the packages of the environment, and so it imports none.
"""

import argparse
import os
import sys

_LINE = "+" + "-" * 27 + "+" + "-" * 17 + "+"


def _devices() -> range:
    return range(int(os.environ.get("HOST_NPU_DEVICES", "1")))


def _chip() -> str:
    return os.environ.get("HOST_NPU_SOC", "Ascend910B").removeprefix("Ascend")


def _table() -> list[str]:
    rows = [f"| {index:<8}{_chip():<18}| {'OK':<16}|" for index in _devices()]
    return [_LINE, f"| {'NPU     Name':<26}| {'Health':<16}|", _LINE, *rows, _LINE]


def _listed() -> list[str]:
    ids = [line for index in _devices() for line in (f"\tNPU ID                         : {index}", _count(1))]
    return [f"\tTotal Count                    : {len(_devices())}", "", *ids]


def _count(chips: int) -> str:
    return f"\tChip Count                     : {chips}"


def _mapped() -> list[str]:
    header = "\tNPU ID    Chip ID    Chip Logic ID    Chip Name"
    return [header, *(f"\t{index:<10}{0:<11}{index:<17}Ascend {_chip()}" for index in _devices())]


def _board(index: int) -> list[str]:
    values = {"NPU ID": index, "Product Name": "host NPU", "Chip Name": _chip(), "Chip Count": 1}
    return [f"\t{name:<31}: {value}" for name, value in values.items()]


def main() -> int:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(prog="npu-smi", description="The devices that the host NPU simulates.")
    info = parser.add_subparsers(dest="command", required=True).add_parser("info", help="the devices")
    kind = info.add_mutually_exclusive_group()
    kind.add_argument("-l", action="store_true", help="list the devices")
    kind.add_argument("-m", action="store_true", help="map the chips")
    kind.add_argument("-t", choices=["board"], help="one device's board; other types are not simulated")
    info.add_argument("-i", type=int, default=0, help="the device of -t")
    asked = parser.parse_args()
    if asked.t and asked.i not in _devices():
        parser.error(f"-i must be one of the {len(_devices())} devices, 0 to {len(_devices()) - 1}, got {asked.i}")
    lines = _listed() if asked.l else _mapped() if asked.m else _board(asked.i) if asked.t else _table()
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
