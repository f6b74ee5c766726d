"""torchair, which torch_npu's wheel contains: it is imported and configured, and compiles only what needs no engine.

Each program is a process of its own, because torch_npu's backend npugraph_ex defines the same operators as torchair.
"""

import os
import subprocess
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# What MindSpeed's builders do when they are imported.
_BUILDER = """
import torch, torch_npu, torchair
from torchair import ge, register_fx_node_ge_converter
from torchair.ge import DataType, Tensor, TensorSpec
from torch.library import Library, impl
library = Library("mine", "DEF")
library.define("twice(Tensor x) -> Tensor")
@impl(library, "twice", "PrivateUse1")
def twice(x): return 2 * x
@register_fx_node_ge_converter(torch.ops.mine.twice.default)
def convert(x: Tensor, meta_outputs: TensorSpec = None): return ge.custom_op("Twice", x)
print(torch.ops.mine.twice(torch.ones(2, device="npu")).tolist(), DataType.DT_FLOAT)
"""
_COMPILED = """
import torch, torch_npu, torchair
config = torchair.CompilerConfig()
config.mode = "{mode}"
function = torch.compile(lambda x: x.sin() @ x, backend=torchair.get_npu_backend(compiler_config=config))
for _ in range(2):
    x = torch.rand(4, 4)
    try:
        print(torch.equal(function(x.npu()).cpu(), x.sin() @ x))
    except RuntimeError as error:
        print([line for line in str(error).splitlines() if line.startswith("RuntimeError")][0])
"""


def _run(code: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(_PACKAGE)}
    command = [sys.executable, "-m", "host_npu", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_builder_registers_its_operator_and_converter():
    assert _run(_BUILDER) == ["[2.0, 2.0] 0"]


def test_compiling_for_the_graph_engine_is_refused_with_the_backends_that_run():
    refusal = (
        'RuntimeError: torch.compile(backend="npu") generates no code for the host NPU: use backend="aot_eager" or'
        ' "eager"; torchair\'s TorchNpuGraphBase is not simulated'
    )
    assert _run(_COMPILED.format(mode="max-autotune")) == [refusal] * 2


def test_graphs_that_need_no_engine_are_captured_and_replayed():
    assert _run(_COMPILED.format(mode="reduce-overhead")) == ["True", "True"]
