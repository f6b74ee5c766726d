"""PyTorch's operators on each chip, as in the table of docs/limits.md."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_npu
import pytest
import torch
import torch_npu
from tests._process import error_of, on_npu
from torch import Tensor, nn
from torch.nn import functional

_PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
_HEAD = """\
| chip | `jit_compile` by default | inference | training | bfloat16 | `scaled_dot_product_attention` calls |
|---|---|---|---|---|---|
"""
_OLDER = ("Ascend910", "Ascend310P")
_each_chip = pytest.mark.parametrize("soc", host_npu.SOCS)
_TOKENS, _WIDTH = 11, 16


class _Block(nn.Module):
    """A language model with one transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        self.block = nn.TransformerEncoderLayer(_WIDTH, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(_WIDTH, _TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), tokens.device, self.head.weight.dtype)
        return self.head(self.block(self.embedding(tokens), mask, is_causal=True))


def _losses(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[float]:
    """Return the losses of three steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(value.item())
    return found


def _train(device: str, dtype: torch.dtype = torch.float32) -> list[float]:
    """Return the losses of a model, the same in each call."""
    torch.manual_seed(0)
    tokens = torch.randint(_TOKENS, (2, 5))
    block, tokens = _Block().eval().to(device, dtype), tokens.to(device)  # disables dropout
    return _losses(block, lambda model: functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()))


def _expect(found: object, expected: object, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def _infers() -> None:
    torch.manual_seed(0)
    model, tokens = _Block().eval(), torch.randint(_TOKENS, (2, 5))
    with torch.no_grad():
        expected = model(tokens)
        _expect(model.to("npu", torch.float16)(tokens.npu()).float().cpu(), expected, 1e-2)


def _trains() -> None:
    _expect(_train("npu"), _train("cpu"), 1e-4)
    # Two more graph operators: the copies of the cast, and dropout.
    model, tokens = _Block().npu(), torch.randint(_TOKENS, (2, 5), device="npu")
    scaler = torch.amp.GradScaler("npu")
    with torch.autocast("npu", torch.float16):
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    scaler.scale(loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def _trains_in_bfloat16() -> None:
    torch.ones(3, device="npu").to(torch.bfloat16)
    torch.npu.synchronize()
    _expect(_train("npu", torch.bfloat16), _train("cpu"), 0.1)


def _attention(dtype: torch.dtype, dropout: float) -> None:
    inputs = [torch.randn(2, 4, 8, 16, dtype=dtype) for _ in range(3)]
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
        found = []
        for device in ("npu", "cpu"):
            torch.manual_seed(1)
            moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
            wide = dtype if device == "npu" else torch.float32
            leaves = [each.to(device, wide, copy=True).requires_grad_() for each in inputs]
            result = functional.scaled_dot_product_attention(*leaves, dropout_p=dropout, **moved)
            result.sum().backward()
            found.append([each.detach().float().cpu() for each in (result, *(leaf.grad for leaf in leaves))])
        if dropout == 0:
            _expect(*found, 1e-4 if dtype == torch.float32 else 2e-2)


def _attends() -> None:
    for dtype in (torch.float32, torch.float16):
        for dropout in (0.0, 0.25):
            _attention(dtype, dropout)


def _dropout_of_attention() -> dict[str, object]:
    """Return the fraction that dropout keeps of equal weights, and whether the gradient drops the same ones."""
    value = torch.eye(64).expand(1, 2, 64, 64).to("npu", torch.float16).requires_grad_()
    zeros = torch.zeros_like(value).requires_grad_()
    result, *_ = torch_npu.npu_fusion_attention(zeros, zeros, value, 2, "BNSD", keep_prob=0.75)
    # With an identity as value, the result is the weights, and the gradient of its sum has their column sums.
    result.sum().backward()
    weights = result.detach().float().cpu()
    return {
        "kept": (weights > 0).float().mean().item(),
        "scaled": (weights.max() * 64).item(),
        "gradient": bool(torch.allclose(value.grad.float().cpu()[..., 0], weights.sum(-2), rtol=1e-2)),
    }


def _operator_of_attention() -> list[str]:
    x = torch.rand(1, 2, 8, 16, dtype=torch.float16, device="npu", requires_grad=True)
    torch.npu.synchronize()
    host_npu.reset()
    functional.scaled_dot_product_attention(x, x, x).sum().backward()
    torch.npu.synchronize()
    return sorted(name for name in host_npu.stats().launches if "Attention" in name)


def _called(call: Callable[[], object]) -> str:
    """Return the error that a use of the chip raises, or an empty string."""
    return error_of(lambda: (call(), torch.npu.synchronize()))


def _gradient_of_an_embedding() -> None:
    torch.npu.set_compile_mode(jit_compile=False)
    nn.Embedding(5, 4).npu()(torch.tensor([1, 2]).npu()).sum().backward()


def _add_to_bfloat16() -> None:
    x = torch.ones(3, dtype=torch.bfloat16).npu()
    assert x.cpu().tolist() == [1, 1, 1]
    assert (x + 1).tolist() == [2, 2, 2]


def _facts() -> dict[str, Any]:
    errors = {
        "inference": _called(_infers),
        "training": _called(_trains),
        "bfloat16": _called(_trains_in_bfloat16),
        "scaled_dot_product_attention": _called(_attends),
    }
    attention = _operator_of_attention()
    return {
        "errors": errors,
        "jit_compile": not torch.npu.is_jit_compile_false(),
        "attention": attention,
        "dropout": _dropout_of_attention() if attention else None,
        "goes on": (torch.ones(2, device="npu") + 1).tolist(),
    }


@functools.cache
def _found(soc: str) -> dict[str, Any]:
    return on_npu(_facts, HOST_NPU_SOC=soc)


def _row(soc: str) -> str:
    found = _found(soc)
    runs = ["no" if found["errors"][name] else "yes" for name in ("inference", "training", "bfloat16")]
    operators = [f"`{name}`" for name in found["attention"] if "Grad" not in name]
    attention = "no" if found["errors"]["scaled_dot_product_attention"] else "".join(operators) or "PyTorch's operators"
    return f"| `{soc}` | {found['jit_compile']} | {' | '.join(runs)} | {attention} |\n"


def test_the_table_of_the_page_of_limits_is_what_each_chip_does():
    assert _HEAD + "".join(map(_row, host_npu.SOCS)) in _PAGE.read_text()


@_each_chip
def test_only_bfloat16_is_refused_and_only_where_the_chip_lacks_it(soc):
    errors = {name: error for name, error in _found(soc)["errors"].items() if error}
    assert list(errors) == (["bfloat16"] if soc in _OLDER else [])
    assert all("bfloat16, which this chip does not have" in error for error in errors.values())
    assert _found(soc)["goes on"] == [2.0, 2.0]


@_each_chip
def test_copies_of_bfloat16_are_computed_with_only_where_the_chip_has_it(soc):
    error = on_npu(_called, _add_to_bfloat16, HOST_NPU_SOC=soc)
    assert ("a tensor has dtype bfloat16, which this chip does not have" in error) == (soc in _OLDER)
    assert soc in _OLDER or error == ""


@_each_chip
def test_older_chips_compile_graph_operators_at_the_call(soc):
    # As torch_npu documents for set_compile_mode.
    assert _found(soc)["jit_compile"] == (soc in _OLDER)


@pytest.mark.parametrize("soc", [soc for soc in host_npu.SOCS if soc not in _OLDER])
def test_attention_drops_the_same_in_both_directions(soc):
    found = _found(soc)["dropout"]
    assert found["gradient"] and abs(found["kept"] - 0.75) < 0.02 and abs(found["scaled"] - 1 / 0.75) < 1e-2


@_each_chip
def test_the_gradient_of_an_embedding_is_refused_where_cann_has_no_kernel(soc):
    error = on_npu(_called, _gradient_of_an_embedding, HOST_NPU_SOC=soc)
    assert ("aclnnEmbeddingDenseBackward: no kernel of this chip" in error) == (soc == "Ascend310P")
    assert soc == "Ascend310P" or error == ""
