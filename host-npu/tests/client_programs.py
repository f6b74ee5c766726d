"""Run other people's libraries, unmodified, on the host NPU and on the CPU: ``python -m tests.client_programs``.

The programs in ``tests/clients`` train a tiny model with each library and print their losses and other results, which
must equal those of the CPU. A library's own test must pass. ``make clients`` installs each library into its own
environment and writes tests/client_programs.md.
"""

import argparse
import importlib.metadata
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import host_npu

_FOLDER = Path(__file__).parent / "clients"
_PAGE = Path(__file__).with_suffix(".md")
_SECONDS = 900
_SWIFT = f"{sys.prefix}-swift/bin/python"
_RANKS = "-m torch.distributed.run --standalone --nproc_per_node 2"


@dataclass(frozen=True)
class Client:
    """A use of a library.

    Attributes:
        name: The feature in use.
        package: The distribution of the library, whose version the page names.
        command: The arguments of ``python -m host_npu``.
        reference: What follows it on the CPU, or on one simulated NPU for a library that has no CPU; nothing for a
            library's own test, which compares by itself.
        close: The tolerance of a loss, relative to the reference's.
        python: The interpreter of its environment.
    """

    name: str
    package: str
    command: str
    reference: str = ""
    close: float = 1e-5
    python: str = sys.executable


def _zero(stage: int, *options: str) -> Client:
    title = f"DeepSpeed ZeRO {stage}" + "".join(f", {option}" for option in options)
    return Client(
        f"{title}, from a checkpoint, 2 ranks",
        "deepspeed",
        f"--devices 2 {_RANKS} zero.py npu {stage} {' '.join(options)}".strip(),
        "zero.py cpu",
    )


CLIENTS = (
    Client("Trainer, sdpa", "transformers", "trainer.py npu sdpa", "trainer.py cpu sdpa"),
    # The CPU has no flash attention, so its bfloat16 rounds elsewhere.
    Client(
        "Trainer, flash_attention_2, bfloat16",
        "transformers",
        "trainer.py npu flash_attention_2",
        "trainer.py cpu flash_attention_2",
        close=1e-2,
    ),
    Client("Trainer with LoRA", "peft", "trainer.py npu sdpa lora", "trainer.py cpu sdpa lora"),
    Client("SFTTrainer", "trl", "sft.py npu", "sft.py cpu"),
    Client("GRPOTrainer, generates by the model", "trl", "grpo.py npu", "grpo.py cpu"),
    Client("Trainer, from a checkpoint", "lightning", "lightning_module.py npu", "lightning_module.py cpu"),
    Client("UNet2DModel with EMAModel, DDIMPipeline", "diffusers", "diffusion.py npu", "diffusion.py cpu"),
    Client("trainer of embeddings", "sentence-transformers", "sentences.py npu", "sentences.py cpu"),
    # Its steps are long: on the CPU, results with one and two threads differ by 3e-5.
    Client(
        "training, decode, transcribe with times of words",
        "openai-whisper",
        "speech.py npu",
        "speech.py cpu",
        close=1e-4,
    ),
    Client(
        "swift sft with LoRA",
        "ms-swift",
        "swift_sft.py npu",
        "swift_sft.py cpu",
        python=_SWIFT,
    ),
    *(_zero(stage) for stage in range(4)),
    *(_zero(stage, "offload") for stage in (2, 3)),
    *(
        Client(
            f"its own training, {what}, 2 ranks",
            "torchtitan",
            f"--devices 2 titan.py 2 --parallelism.{option}_degree=2",
            "titan.py 1",
        )
        for what, option in (("tensor parallel", "tensor_parallel"), ("context parallel", "context_parallel"))
    ),
    Client(
        "Megatron Core by transfer_to_npu, tensor parallel, 2 ranks",
        "megatron-core",
        f"--devices 2 {_RANKS} gpt.py",
        f"{_RANKS.replace('2', '1')} gpt.py",
    ),
    *(
        Client(f"its own {script}, 2 ranks", "accelerate", f"--devices 2 {_RANKS} -m {module}")
        for script in ("test_script", "test_sync", "test_ops")
        for module in (f"accelerate.test_utils.scripts.{script}",)
    ),
)


@dataclass(frozen=True)
class Result:
    """The result of a client; the problem is empty if it passed."""

    client: Client
    seconds: float
    problem: str


@cache
def _output(python: str, command: str) -> tuple[str, str]:
    """Return the output of a command, and its failure if any."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TOKENIZERS_PARALLELISM": "false"}
    whole = [python, "-m", "host_npu", *shlex.split(command)]
    try:
        done = subprocess.run(
            whole, cwd=_FOLDER, env=environment, timeout=_SECONDS, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"not finished after {_SECONDS} s"
    if done.returncode == 0:
        return done.stdout, ""
    last = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()[-1:]
    return done.stdout, f"status {done.returncode}: {last[0] if last else 'nothing was printed'}"


def _losses(output: str) -> list[float]:
    return [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss ")]


def difference(found: list[float], expected: list[float], close: float) -> str:
    """Return a description of how losses differ from the expected ones; empty if they agree."""
    if not expected or len(found) != len(expected):
        return f"{len(found)} losses instead of {len(expected)}"
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not abs(one - other) <= close * abs(other):
            return f"loss {step} is {one} instead of {other}"
    return ""


def run(client: Client) -> Result:
    """Run a client on the host NPU and on the CPU, and compare their losses."""
    start = time.monotonic()
    output, problem = _output(client.python, client.command)
    seconds = time.monotonic() - start
    if client.reference and not problem:
        expected, problem = _output(client.python, client.reference)
        problem = problem or difference(_losses(output), _losses(expected), client.close)
    return Result(client, seconds, problem)


_TITLE = """\
# Programs that run

Libraries that run on the host NPU as they are installed. `make -C host-npu clients` installs them into environments
of their own, trains a tiny model by each on the host NPU and on the CPU, compares the losses of every step (and what is
generated, drawn or transcribed) and writes this page. The programs are in `tests/clients`; those with 2 ranks run on
two simulated NPUs. torchtitan and Megatron Core have no CPU: their two ranks are compared with one. A library's own
test has no losses to compare: it succeeds. The seconds include the start, and depend on the machine and its load.

This page was written by host_npu {version} with torch {torch} and torch_npu {torch_npu}.

| library | version | what runs | `python -m host_npu ...` | losses | seconds |
|---|---|---|---|---|---|
"""


_END = """
Tried by hand: verl 0.9.1's SFT trainer in bfloat16 (FSDP, FSDP2, Ulysses on 2 ranks), 4 losses within 1e-4 of the
CPU's; torchtune 0.6.1 with `device=npu` and ultralytics 8.4.190's YOLOv8 with `device="npu"`, equal to all digits.

What does not run, and why:

- **LLaMA-Factory** 0.9.5 imports torchaudio, and PyPI's does not load beside the CPU build of this torch.
- **openai-whisper's beam search** has one batch of keys for several batches of queries, which CANN's
  `aclnnFlashAttentionScore` refuses.
- **Megatron Core's gradient clipping and distributed optimizer** ask for the type `torch.cuda.FloatTensor`, which
  MindSpeed replaces, and its checkpoints for `TORCH_NPU_DEVICE_CAPABILITY=8.0`. That is so on a device, too.
- **ms-swift with `--fp16`**: torch_npu's `GradScaler` gives `step` of a fused optimizer an argument that torch's
  optimizers do not take. That is so on a device, too.
"""


def _version(client: Client) -> str:
    asked = f"import importlib.metadata; print(importlib.metadata.version({client.package!r}))"
    return subprocess.run([client.python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def page(results: list[Result]) -> str:
    """Return the page with the results."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torch_npu")}
    rows = [
        f"| {client.package} | {_version(client)} | {client.name} | `{client.command}` | "
        f"{_said(client, result.problem)} | {result.seconds:.0f} |"
        for result in results
        for client in (result.client,)
    ]
    return _TITLE.format(version=host_npu.__version__, **versions) + "\n".join(rows) + "\n" + _END


def _said(client: Client, problem: str) -> str:
    if problem:
        return problem.replace("|", " ")
    return f"equal within {client.close:g}" if client.reference else "its own test"


def main() -> int:
    """Run the clients named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names of clients or libraries (default: all)")
    parser.add_argument("--write", action="store_true", help="write tests/client_programs.md")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (default: 2)")
    arguments = parser.parse_args()
    wanted = [
        client
        for client in CLIENTS
        if not arguments.names or any(part in f"{client.package} {client.name}" for part in arguments.names)
    ]
    results = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for result in pool.map(run, wanted):
            results.append(result)
            what = f"{result.client.package}, {result.client.name}"
            print(f"{what}: {result.problem or 'well'}, {result.seconds:.0f} s", flush=True)
    if arguments.write:
        _PAGE.write_text(page(results))
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main())
