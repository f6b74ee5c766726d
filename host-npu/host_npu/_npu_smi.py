"""The tool ``npu-smi`` of the host NPU, which prints the simulated devices in the format that programs parse.

It runs without site packages, so it imports none. Values that are not simulated are NA, as in CANN's tool for values
that a machine cannot measure.
"""

import argparse
import ctypes
import functools
import os
import sys

_ACL_HBM_MEM = 1
_NOT_SIMULATED = "NA"
_WIDTHS = (27, 15, 52)


def _devices() -> range:
    return range(int(os.environ.get("HOST_NPU_DEVICES", "1")))


def _chip() -> str:
    return os.environ.get("HOST_NPU_SOC", "Ascend910B").removeprefix("Ascend")


@functools.cache
def _runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "_lib", "libascendcl.so"))
    _check(runtime.aclInit(None))
    return runtime


def _check(status: int) -> None:
    if status:
        raise OSError(f"the simulated CANN returns {status}")


def _megabytes(index: int) -> tuple[int, int]:
    """Return the memory of a device that is not available, and its total."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _check(_runtime().aclrtSetDevice(index))
    _check(_runtime().aclrtGetMemInfo(_ACL_HBM_MEM, ctypes.byref(free), ctypes.byref(total)))
    return (total.value - free.value) >> 20, total.value >> 20


def _row(*cells: str) -> str:
    return "".join(f"| {cell:<{width - 1}}" for cell, width in zip(cells, _WIDTHS, strict=True)) + "|"


def _table() -> list[str]:
    thin, thick = ("+" + "+".join(line * width for width in _WIDTHS) + "+" for line in "-=")
    header = [
        _row("NPU   Name", "Health", "Power(W)    Temp(C)           Hugepages-Usage(page)"),
        _row("Chip", "Bus-Id", "AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)"),
    ]
    lines = [thin, *header, thick]
    for index in _devices():
        used, total = _megabytes(index)
        lines += [
            _row(f"{index:<6}{_chip()}", "OK", f"{_NOT_SIMULATED:<12}{_NOT_SIMULATED:<18}{_NOT_SIMULATED}"),
            _row("0", _NOT_SIMULATED, f"{_NOT_SIMULATED:<12}{'0    / 0':<18}{used:<5}/ {total}"),
            thick,
        ]
    return lines


def _values(**values: object) -> list[str]:
    return [f"\t{name:<31}: {value}" for name, value in values.items()]


def _listed() -> list[str]:
    ids = [line for index in _devices() for line in (*_values(**{"NPU ID": index, "Chip Count": 1}), "")]
    return [*_values(**{"Total Count": len(_devices())}), "", *ids]


def _mapped() -> list[str]:
    lines = [f"\t{'NPU ID':<31}{'Chip ID':<31}{'Chip Logic ID':<31}Chip Name"]
    return [*lines, *(f"\t{index:<31}{0:<31}{index:<31}Ascend {_chip()}" for index in _devices())]


def _board(index: int) -> list[str]:
    values = {"NPU ID": index, "Product Name": "host NPU", "Chip Name": _chip(), "Chip Count": 1, "Chip ID": 0}
    return _values(**values)


def _memory(index: int) -> list[str]:
    return _values(**{"NPU ID": index, "Chip Count": 1, "HBM Capacity(MB)": _megabytes(index)[1], "Chip ID": 0})


def _usages(index: int) -> list[str]:
    used, total = _megabytes(index)
    cores = {f"{name} Usage Rate(%)": _NOT_SIMULATED for name in ("Aicore", "Aivector", "Aicpu", "Ctrlcpu")}
    rates = {"HBM Capacity(MB)": total, "HBM Usage Rate(%)": 100 * used // total, **cores}
    return _values(**{"NPU ID": index, "Chip Count": 1, **rates, "Chip ID": 0})


def _common(index: int) -> list[str]:
    used, total = _megabytes(index)
    names = ("Usage Rate(%)", "Freq(MHZ)", "curFreq(MHZ)", "Count")
    cores = {f"Aicore {name}": _NOT_SIMULATED for name in names}
    others = {"Temperature(C)": _NOT_SIMULATED, "NPU Real-time Power(W)": _NOT_SIMULATED}
    rates = {"Memory Usage Rate(%)": 0, "HBM Usage Rate(%)": 100 * used // total}
    return _values(**{"NPU ID": index, "Chip Count": 1, "Chip ID": 0, **rates, **cores, **others})


def _topology() -> list[str]:
    """Return the table of links, and the processors close to the devices."""
    cpus = sorted(os.sched_getaffinity(0))
    first = [cpu for cpu in cpus if cpu - 1 not in cpus]
    last = [cpu for cpu in cpus if cpu + 1 not in cpus]
    affinity = ",".join(f"{begin}-{end}" for begin, end in zip(first, last, strict=True))
    names = [f"NPU{index}" for index in _devices()]
    lines = ["\t   " + "".join(f"{name:<11}" for name in (*names, "CPU Affinity"))]
    for row in names:
        links = ["X" if column == row else "HCCS" for column in names]
        lines.append("".join(f"{cell:<11}" for cell in (row, *links)) + affinity)
    return lines


_TYPES = {"board": _board, "memory": _memory, "usages": _usages, "common": _common}


def main() -> int:
    """Print the requested information."""
    parser = argparse.ArgumentParser(prog="npu-smi", description="The devices that the host NPU simulates.")
    info = parser.add_subparsers(dest="command", required=True).add_parser("info", help="the devices")
    kind = info.add_mutually_exclusive_group()
    kind.add_argument("-l", action="store_true", help="list the devices")
    kind.add_argument("-m", action="store_true", help="map the chips")
    kind.add_argument(
        "-t", choices=(*_TYPES, "topo"), help="what to show of each device; other types are not simulated"
    )
    info.add_argument("-i", type=int, choices=_devices(), help="the device of -t; all devices by default")
    info.add_argument("-c", type=int, choices=[0], help="the chip of the device, which has one")
    asked = parser.parse_args()
    if asked.t == "topo":
        lines = _topology()
    elif asked.t:
        indices = _devices() if asked.i is None else [asked.i]
        lines = [line for index in indices for line in (*_TYPES[asked.t](index), "")]
    else:
        lines = _listed() if asked.l else _mapped() if asked.m else _table()
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
