"""Random calls of the simulated C functions for a given time: ``make fuzz``, or ``python -m tests.fuzz --seconds 600``.

libFuzzer calls CANN's functions through ``csrc/tests/fuzz`` on every chip, guided by code coverage. Inputs that reached
new code are kept in ``.fuzz`` and tried first next time; ``.fuzz/crash-*`` are inputs that ended the program.
"""

import argparse
import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import host_npu

from tests import _c_program

FOLDER = _c_program.PROJECT / ".fuzz"
_TARGET = _c_program.PROJECT / "csrc" / "tests" / "fuzz"

_FLOAT, _HALF, _INT32, _UINT8, _INT64, _BOOL, _BF16 = 0, 1, 3, 4, 9, 12, 27


def _tensor(dtype: int, *shape: int) -> list[int]:
    """Return the bytes that encode a contiguous tensor, as ``input.h`` and ``target.cpp`` decode them."""
    return [1, dtype + 1, len(shape), *map(_number, shape)]


def _number(value: int) -> int:
    return value + 8


def operators() -> dict[str, list[str]]:
    """Return the parameters of phase one of CANN's functions; inputs number the functions in this order."""
    return {
        name: re.findall(r"(\w+)[ *&]+\w+[,)]", parameters)[:-2] for name, parameters in _c_program.OPERATORS.items()
    }


def _begin(operator: str) -> list[int]:
    memory, twice = 0, 64
    return [memory, twice + list(operators()).index(operator)]


def _call(operator: str, *arguments: list[int] | int) -> bytes:
    """Return an input that calls an operator twice; the byte before the arguments requests both results."""
    usual = 0
    flat = [byte for each in arguments for byte in (each if isinstance(each, list) else [each])]
    return bytes([*_begin(operator), usual, *flat, usual])


def _simple_call(operator: str) -> bytes:
    """Return a call with equal matrices, ones and no flags."""
    usual = {"aclTensor": _tensor(_FLOAT, 2, 2), "bool": [0], "float": [1], "double": [1]}
    return _call(operator, *(usual.get(kind, [_number(1)]) for kind in operators()[operator]))


def seeds() -> dict[str, bytes]:
    """Return inputs with valid calls, one for each operator, and inputs that once ended the program."""
    missing = [0]
    square, row, scalar = _tensor(_FLOAT, 2, 2), _tensor(_FLOAT, 3), _tensor(_FLOAT)
    none, mean = _number(0), _number(1)
    logits, states = _tensor(_FLOAT, 3, 130), [_tensor(_FLOAT, 2, 2)] * 5
    given = {
        "aclnnMseLoss": (square, square, mean, scalar),
        "aclnnMseLossOut": (square, square, none, square),
        "aclnnBinaryCrossEntropy": (square, square, square, none, square),
        "aclnnBinaryCrossEntropyBackward": (square, square, square, missing, none, square),
        "aclnnEmbedding": (_tensor(_FLOAT, 10, 3), _tensor(_INT64, 4), _tensor(_FLOAT, 4, 3)),
        "aclnnEmbeddingDenseBackward": (
            *(_tensor(_FLOAT, 2, 3), _tensor(_INT64, 2), _number(4), _number(1), 0, _tensor(_FLOAT, 4, 3)),
        ),
        "aclnnFusedLinearOnlineMaxSum": (
            *(_tensor(_HALF, 3, 4), _tensor(_HALF, 5, 4), _tensor(_INT32, 3), _number(0), _number(2), row, row, row),
            *(_tensor(_UINT8, 1), _tensor(_INT32, 3), _tensor(_HALF, 3, 5)),
        ),
        "aclnnFusedCrossEntropyLossWithMaxSum": (row, row, row, 0, missing, missing, logits, row, logits),
        "aclnnFusedLinearCrossEntropyLossGrad": (
            *(row, _tensor(_BF16, 3, 4), _tensor(_BF16, 130, 4), _tensor(_BOOL, 3), _tensor(_INT32, 3), 0),
            *(missing, missing, logits, _tensor(_BF16, 3, 4), _tensor(_BF16, 130, 4)),
        ),
        "aclnnApplyFusedEmaAdam": (*states, _tensor(_INT64, 1), 4, 2, 2, 3, 4, _number(1), 1, 0),
        "aclnnCast": (_tensor(_FLOAT, 2, 3), _HALF + 1, _tensor(_HALF, 2, 3)),
        "aclnnInplaceCopy": (_tensor(_FLOAT, 2, 3), _tensor(_HALF, 2, 3)),
    }
    calls = {name: _call(name, *given[name]) if name in given else _simple_call(name) for name in operators()}
    without_a_step = base64.b64decode("AAEBAgoKAQECCgoBAQIKCgEBAgoKAQECCgoBCgEI/zsCAgMECdkBAA==")
    return {
        **calls,
        "apply_fused_ema_adam_without_a_step": bytes(_begin("aclnnApplyFusedEmaAdam")) + without_a_step,
    }


def write_seeds(folder: Path) -> list[Path]:
    """Write the inputs of :func:`seeds` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in seeds()]
    for path, content in zip(paths, seeds().values(), strict=True):
        path.write_bytes(content)
    return paths


def target(compiler: Sequence[str], libraries: Path, *sources: str, checks: str) -> Path:
    """Compile the fuzzer's target and link it with the host NPU.

    Args:
        compiler: The command of the C++ compiler.
        libraries: The folder of the host NPU's libraries.
        sources: Further sources in the target's folder.
        checks: The value of ``-fsanitize=``; empty for none.
    """
    files = [_TARGET / name for name in ("target.cpp", *sources)]
    helpers = [_TARGET.parent / "device.cpp"]
    names = [name for name in _c_program.LIBRARIES if name != "hccl"]
    links = [*_c_program.shared(libraries, names), *([f"-fsanitize={checks}"] if checks else [])]
    calls = f"-DOPERATORS={' '.join(f'OPERATOR({name})' for name in operators())}"
    (program,) = _c_program.compiled([*compiler, calls], [links], sources=[*files, *helpers])
    return program


def fuzz_calls(seconds: float) -> bool:
    """Fuzz the simulated functions, with the time divided among the chips, and return whether nothing was found."""
    if shutil.which("clang++") is None:
        sys.exit("coverage-guided fuzzing needs clang with libFuzzer: apt-get install clang libclang-rt-dev")
    checks = "address,undefined"
    libraries = _c_program.instrumented(f"fuzzer-no-link,{checks}", "clang++")
    program = target(["clang++"], libraries, checks=f"fuzzer,{checks}")
    corpus = FOLDER / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    write_seeds(FOLDER / "seeds")
    total, passed = 0, True
    for soc in host_npu.SOCS:
        # A small cache of phase one, so that entries are also evicted.
        environment = {**os.environ, "HOST_NPU_SOC": soc, "ACLNN_CACHE_LIMIT": "8"}
        options = [f"-max_total_time={round(seconds / len(host_npu.SOCS))}", "-timeout=20", "-rss_limit_mb=4096"]
        options += ["-max_len=512", "-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={FOLDER}/"]
        command = [str(program), *options, str(corpus), str(FOLDER / "seeds")]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        units = re.search(r"stat::number_of_executed_units: (\d+)", result.stderr)
        total += int(units[1]) if units else 0
        if result.returncode != 0:
            passed = False
            print(f"{soc}, {program}: {result.stderr}")
    kept = len(list(corpus.iterdir()))
    print(f"C functions: {total} inputs on {len(host_npu.SOCS)} chips, {kept} of them kept", flush=True)
    return passed


def main() -> int:
    """Run as the command line requests; return 1 if something was found."""
    parser = argparse.ArgumentParser(description="Give C functions random arguments for a time.")
    parser.add_argument("--seconds", type=float, default=60, help="default: 60")
    passed = fuzz_calls(parser.parse_args().seconds)
    print("nothing found" if passed else "FOUND: see above")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
