"""A training step of the demo on the host NPU and on the CPU: ``python -m benchmarks.host_npu``.

Each has a process of its own, and they take turns. On the CPU the step uses the kernels of PyTorch and ``csrc/cpu``;
on the host NPU it goes through torch_npu, its queue and the simulated operators.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks._harness import Call, compare, parser, run
from benchmarks._results import ROOT, Row

_DTYPES = ("float32", "bfloat16")
_WARM_UP_STEPS = 3


@contextmanager
def _process(device: str, dtype: str, threads: int, folder: str) -> Iterator[Call]:
    """Start a process that does a step of the demo for each line it is given."""
    runner = ["-m", "host_npu"] if device == "npu" else []
    arguments = ["--child", device, dtype, folder, "--threads", str(threads)]
    command = [sys.executable, *runner, "-m", "benchmarks.host_npu", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None

        def step() -> None:
            print(file=process.stdin, flush=True)
            if not process.stdout.readline():
                raise RuntimeError(f"the process on {device} ended with status {process.wait()}")

        step()
        yield step
        process.stdin.close()


def _serve(device: str, dtype: str, folder: str, threads: int) -> None:
    """Do a step for each line of the standard input, and answer with a line."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch  # after torch_aclnn_ops, which the harness imports
    from lm_training import Settings, Trainer
    from text_data import load_text_data

    torch.set_num_threads(threads)
    trainer = Trainer(Settings(device=device, dtype=dtype), load_text_data(Path(folder)))
    for _ in range(_WARM_UP_STEPS):
        trainer.train_step()
    for _ in sys.stdin:
        trainer.train_step()
        print(flush=True)


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare the steps of each dtype."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in _DTYPES:
            with ExitStack() as processes:
                calls = {
                    by: processes.enter_context(_process(device, dtype, options.threads, folder))
                    for by, device in (("the CPU", "cpu"), ("the host NPU", "npu"))
                }
                rows += compare(
                    calls,
                    options.rounds,
                    calls=1,
                    operator="all of the demo's",
                    configuration="examples/train_lm.py: 3 layers, width 192, 8 x 128 tokens",
                    device="cpu",
                    dtype=dtype,
                )
    return rows


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child:
        _serve(*options.child, options.threads)
    else:
        run("host_npu", measure, options, rounds=40)
