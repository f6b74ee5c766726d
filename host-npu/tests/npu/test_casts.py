"""Casts of numbers at the limits of a dtype."""

import torch

_INT32, _INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)
_LARGE = [2**63 + 2**40, 2**64 - 1, 3]


def test_signed_integers_saturate():
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e9, -3e9, 7.9, -7.9]).npu()
    ends = [_INT32.max, _INT32.min, 0, _INT32.max, _INT32.min, 7, -7]
    assert values.to(torch.int32).tolist() == ends
    assert values.bfloat16().to(torch.int32).tolist()[:3] == ends[:3]
    assert values.to(torch.int64).tolist()[:3] == [_INT64.max, _INT64.min, 0]


def test_unsigned_integers_of_64_bits_have_no_sign():
    values = torch.tensor(_LARGE, dtype=torch.uint64)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
        assert torch.equal(values.npu().to(dtype).cpu(), values.to(dtype))
    large = torch.tensor([1e19, 2.0**63, 3.0])
    assert large.npu().to(torch.uint64).tolist() == [int(x) for x in large.tolist()]
