"""docs/limits.md: unsupported calls are refused with a message at the call, and the program continues."""

import pytest
import torch
import torch_npu
from tests._values import refused


def _half(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float16, device="npu")


def _int8(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int8, device="npu")


def _quant_lightning_indexer() -> None:
    scales = _half(1, 4, 64), _half(1, 8, 1)
    torch_npu.npu_quant_lightning_indexer(_int8(1, 4, 64, 128), _int8(1, 8, 1, 128), _half(1, 4, 64), *scales, 0, 0)


# The name on the page, a call, and its message. test_graph_refusals.py has the refusals during captures.
REFUSED = [
    ("npu_max", lambda: torch_npu.npu_max(_half(4, 2), 1), "does not simulate the graph operator"),
    ("npu_pad", lambda: torch_npu.npu_pad(_half(4, 2), [1, 1, 1, 1]), "does not simulate the graph operator"),
    ("npu_quant_lightning_indexer", _quant_lightning_indexer, "does not simulate aclnnQuantLightningIndexer"),
    (
        "npu_mm_all_reduce_base",
        lambda: torch_npu.npu_mm_all_reduce_base(_int8(4, 8), _int8(8, 4), "group", dequant_scale=_half(4)),
        "does not simulate aclnnQuantMatmulAllReduce",
    ),
]


@pytest.mark.parametrize(("name", "call", "sentence"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_the_page_of_limits_lists_is_refused_and_the_program_goes_on(name, call, sentence, request):
    page = request.config.rootpath / "docs" / "limits.md"
    assert f"`{name}`" in page.read_text()
    with refused(sentence):
        call()
