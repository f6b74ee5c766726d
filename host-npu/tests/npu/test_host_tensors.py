"""CPU tensors next to NPU tensors: a number may be a CPU operand, but never an output."""

import pytest
import torch
from torch import Tensor


def _number(value: float = 0.0) -> Tensor:
    return torch.tensor(value)


def _npu(*shape: int) -> Tensor:
    return torch.ones(shape, device="npu")


_WRITES = {
    "add_": lambda: _number().add_(_npu()),
    "mul_": lambda: _number().mul_(_npu()),
    "sum": lambda: torch.sum(_npu(3), 0, out=_number()),
    "add": lambda: torch.add(_npu(), _npu(), out=_number()),
    "max": lambda: torch.max(_npu(3), 0, out=(_number(), torch.tensor(0))),
    "where": lambda: torch.where(_npu() > 0, _npu(), _npu(), out=_number()),
    "foreach": lambda: torch._foreach_add_([_number()], [_npu()]),
}


@pytest.mark.parametrize("name", _WRITES)
def test_a_number_of_the_host_is_not_written_to(name):
    with pytest.raises(RuntimeError, match="found at least two devices, npu:0 and cpu"):
        _WRITES[name]()


def test_a_number_of_the_host_is_an_operand():
    assert (_npu(2) + _number(2.0)).tolist() == [3, 3]
    assert torch.where(_npu(2) > 0, _number(5.0), _npu(2)).tolist() == [5, 5]
    assert _npu(2).mul_(_number(3.0)).tolist() == [3, 3]


def test_lists_are_copied_from_and_to_the_host():
    on_npu, on_host = [_npu(3), _npu(2)], [torch.zeros(3), torch.zeros(2)]
    torch._foreach_copy_(on_npu, [torch.arange(3.0), torch.tensor([4, 5])])
    torch._foreach_copy_(on_host, on_npu)
    assert [x.tolist() for x in on_npu] == [x.tolist() for x in on_host] == [[0, 1, 2], [4, 5]]
