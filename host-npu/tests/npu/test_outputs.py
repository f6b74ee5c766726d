"""Outputs that alias inputs, integers in histc, and writes of complex numbers."""

import pytest
import torch
from torch import Tensor


def _column() -> Tensor:
    return torch.ones(3, 1, device="npu")


def _matrix() -> Tensor:
    return torch.full((3, 4), 2.0, device="npu")


_LARGER = {
    "add": lambda x: torch.add(x, _matrix(), out=x),
    "where": lambda x: torch.where(x > 0, _matrix(), x, out=x),
    "lerp": lambda x: torch.lerp(x, _matrix(), 0.5, out=x),
    "addcmul": lambda x: torch.addcmul(x, _matrix(), _matrix(), out=x),
    "logical_xor_": lambda x: x.logical_xor_(_matrix()),
    "ldexp_": lambda x: x.ldexp_(_matrix()),
}


@pytest.mark.parametrize("name", _LARGER)
def test_an_output_that_is_an_input_is_not_resized(name):
    x = _column()
    with pytest.raises(RuntimeError, match=r"output with shape \[3, 1\] doesn't match the broadcast shape \[3, 4\]"):
        _LARGER[name](x)
    assert x.tolist() == [[1], [1], [1]]


def test_an_output_that_is_every_input_holds_the_result():
    x = _matrix()
    assert torch.addcmul(x, x, x, out=x) is x
    assert x.tolist() == [[6] * 4] * 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_histc_counts_integers(dtype):
    experts = torch.tensor([0, 2, 2, 3, 7, 7, 7], device="npu").to(dtype)
    counts = torch.histc(experts, 8, 0, 7)
    assert (counts.dtype, counts.tolist()) == (dtype, [1, 0, 2, 1, 0, 0, 0, 3])


def test_histc_counts_integers_into_an_output():
    out = torch.empty(0, dtype=torch.int64, device="npu")
    assert torch.histc(torch.tensor([1, 5, 9], device="npu"), 2, out=out) is out
    assert out.tolist() == [1, 2]


def _complex() -> Tensor:
    return torch.tensor([1 + 2j, 3 + 4j], device="npu")


_CONJUGATED = {
    "copy_": lambda: _complex().conj().copy_(_complex()),
    "copy_ of the host": lambda: _complex().conj().copy_(torch.ones(2, dtype=torch.complex64)),
    "copy_ to the host": lambda: torch.zeros(2, dtype=torch.complex64).conj().copy_(_complex()),
    "mul_": lambda: _complex().conj().mul_(2j),
    "fill_": lambda: _complex().conj().fill_(1j),
    "an assignment": lambda: _complex().conj().__setitem__(0, 5 + 6j),
    "out": lambda: torch.add(_complex(), 1, out=_complex().conj()),
}


@pytest.mark.parametrize("name", _CONJUGATED)
def test_a_conjugate_is_not_written_to(name):
    with pytest.raises(RuntimeError, match="torch_npu does not conjugate what is written to a conjugate"):
        _CONJUGATED[name]()


def test_conjugates_are_copied():
    x = _complex()
    z = torch.zeros_like(x)
    assert z.copy_(x.conj()).tolist() == [1 - 2j, 3 - 4j]
    assert z.conj().copy_(x.conj()).resolve_conj().tolist() == [1 - 2j, 3 - 4j]
    assert x.conj().cpu().tolist() == x.conj().clone().tolist() == [1 - 2j, 3 - 4j]
    assert x.cpu().conj().copy_(torch.ones(2)).tolist() == [1, 1]


def test_conj_physical_changes_the_tensor_in_place():
    assert _complex().conj_physical_().tolist() == [1 - 2j, 3 - 4j]
