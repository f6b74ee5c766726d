"""torchair, contained in torch_npu's wheel: it can be imported and configured, and compiles what needs no engine.

Each program runs in its own process, because torch_npu's backend npugraph_ex defines the same operators as torchair.
"""

import torch
from tests._process import error_of, on_npu


def _build() -> list[float]:
    """Do what MindSpeed's builders do at import."""
    import torchair
    from torch.library import Library, impl
    from torchair import ge, register_fx_node_ge_converter
    from torchair.ge import DataType, Tensor, TensorSpec

    library = Library("mine", "DEF")
    library.define("twice(Tensor x) -> Tensor")

    @impl(library, "twice", "PrivateUse1")
    def twice(x):
        return 2 * x

    @register_fx_node_ge_converter(torch.ops.mine.twice.default)
    def convert(x: Tensor, meta_outputs: TensorSpec = None):
        return ge.custom_op("Twice", x)

    assert DataType.DT_FLOAT == 0 and torchair.CompilerConfig()
    return torch.ops.mine.twice(torch.ones(2, device="npu")).tolist()


def test_a_builder_registers_its_operator_and_converter():
    assert on_npu(_build) == [2.0, 2.0]


def _compile(mode: str) -> list[str]:
    """Return the errors of two calls of a compiled function; empty if their results are right."""
    import torchair

    config = torchair.CompilerConfig()
    config.mode = mode
    function = torch.compile(lambda x: x.sin() @ x, backend=torchair.get_npu_backend(compiler_config=config))

    def call() -> None:
        x = torch.rand(4, 4)
        assert torch.equal(function(x.npu()).cpu(), x.sin() @ x)

    return [error_of(call) for _ in range(2)]


def test_compiling_for_the_graph_engine_is_refused_with_the_backends_that_run():
    refusal = (
        'torch.compile(backend="npu") generates no code for the host NPU: use backend="aot_eager" or'
        ' "eager"; torchair\'s TorchNpuGraphBase is not simulated'
    )
    for error in on_npu(_compile, "max-autotune"):
        assert refusal in error


def test_graphs_that_need_no_engine_are_captured_and_replayed():
    assert on_npu(_compile, "reduce-overhead") == ["", ""]
