"""Count the instructions of the calling thread with valgrind: the same number on a busy machine as on an idle one."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._harness import Call

_TOGGLE = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_TOGGLE_COLLECT; }
void stop(void) { CALLGRIND_TOGGLE_COLLECT; CALLGRIND_STOP_INSTRUMENTATION; }
"""


def count_instructions(module: str, arguments: Sequence[str], calls: int) -> float:
    """Return the instructions of a call, which ``python -m module --run TOGGLE CALLS *arguments`` makes.

    Args:
        module: a benchmark that passes these arguments to :func:`run_counted`.
        arguments: what tells the call.
        calls: how many are counted.
    """
    if shutil.which("valgrind") is None:
        sys.exit(f"{module}: --instructions needs valgrind and its headers")
    with tempfile.TemporaryDirectory() as folder:
        toggle, output = Path(folder) / "toggle.so", Path(folder) / "counts"
        compiler = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(toggle)]
        subprocess.run(compiler, input=_TOGGLE, text=True, check=True)
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        command = [*valgrind, "--separate-threads=yes", f"--callgrind-out-file={output}", sys.executable, "-m", module]
        subprocess.run([*command, "--run", str(toggle), str(calls), *arguments], check=True, capture_output=True)
        counted = re.search(r"^totals: (\d+)", Path(f"{output}-01").read_text(), re.MULTILINE)
    assert counted is not None
    return int(counted[1]) / calls


def run_counted(call: Call, wait: Callable[[], object], toggle: str, calls: str) -> None:
    """Make the counted calls, under valgrind, and end the process.

    Args:
        call: is made a few times before it counts.
        wait: waits for the device.
        toggle: the library that starts and stops the count.
        calls: their number.
    """
    library = ctypes.CDLL(toggle)
    for _ in range(10):
        call()
    wait()
    library.start()
    for _ in range(int(calls)):
        call()
    library.stop()
    wait()
    os._exit(0)  # to end Python under valgrind takes longer than all of the above
