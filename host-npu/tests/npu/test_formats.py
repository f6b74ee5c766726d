"""torch's operators on tensors in the private format FRACTAL_NZ, which are stored in tiles, not rows."""

import pytest
import torch
import torch_npu

_NZ = 29

pytestmark = pytest.mark.usefixtures("private_formats")


def _tiled_pair():
    rows = torch.rand(40, 20, device="npu")
    return torch_npu.npu_format_cast(rows, _NZ), rows


@pytest.mark.parametrize(
    "function",
    [
        lambda tensor: tensor + 1,
        lambda tensor: tensor * tensor,
        lambda tensor: tensor.sum(0),
        lambda tensor: tensor @ tensor.t(),
        lambda tensor: torch.cat([tensor, tensor]),
        lambda tensor: torch.stack([tensor.flatten(), tensor.reshape(-1)]),
        lambda tensor: tensor.add_(1),
        lambda tensor: torch.mul(tensor, 2, out=tensor),
        lambda tensor: torch.mul(tensor, tensor, out=tensor),
        lambda tensor: tensor[3:5] - tensor.mean(),
    ],
)
def test_operators_read_and_write_it_as_the_same_numbers(function):
    tiled, rows = _tiled_pair()
    assert torch.equal(function(tiled).cpu(), function(rows).cpu())
    assert torch.equal(tiled.cpu(), rows.cpu())


@pytest.mark.parametrize("source", ["number", "cpu", "npu"])
@pytest.mark.parametrize(
    "part", [3, slice(33, 35), slice(7, 40), slice(0, 1), (slice(None), 4), (slice(None, None, 2), 17)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_a_part_of_it_is_written(dtype, part, source):
    rows = torch.randint(-9, 9, (40, 20)).to(dtype)
    tiled = torch_npu.npu_format_cast(rows.npu(), _NZ)
    values = rows[part] + 1
    tiled[part] = {"number": 7, "cpu": values, "npu": values.npu()}[source]
    rows[part] = 7 if source == "number" else values
    assert torch_npu.get_npu_format(tiled) == _NZ and torch.equal(tiled.cpu(), rows)


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor[1].copy_(tensor[2] + 1),
        lambda tensor: tensor[1].copy_(torch.ones(40, 20)),
        lambda tensor: tensor[1:].zero_(),
        lambda tensor: tensor.transpose(1, 2)[2].mul_(2),
        lambda tensor: torch.add(tensor[0], 1, out=tensor[2]),
    ],
)
def test_a_matrix_of_it_is_written(write):
    rows = torch.rand(3, 40, 20)
    tiled = torch_npu.npu_format_cast(rows.npu(), _NZ)
    write(tiled)
    write(rows)
    assert torch.equal(tiled.cpu(), rows)


def test_a_number_of_a_part_of_it_is_not_read():
    tiled, rows = _tiled_pair()
    with pytest.raises(RuntimeError, match="torch_npu reads a wrong number from a part of a tensor in a private"):
        tiled[1, 1].item()
    assert (tiled[1, 1] + 0).item() == rows[1, 1].item()


@pytest.mark.parametrize("format", [_NZ, 3], ids=["FRACTAL_NZ", "NC1HWC0"])
def test_without_private_formats_a_cast_is_a_copy(format):
    torch.npu.config.allow_internal_format = False
    rows = torch.rand(2, 3, 4, 5, device="npu", requires_grad=True)
    copied = torch_npu.npu_format_cast(rows, format)
    assert int(torch_npu.get_npu_format(copied)) in (0, 2)  # NCHW, ND
    assert torch.equal(copied, rows) and torch.equal(torch_npu.npu_format_cast(rows[..., ::2], format), rows[..., ::2])
    (copied * rows.detach()).sum().backward()
    assert torch.equal(rows.grad, rows)


# Convolution weights, images, vectors of channels and matrices, larger and smaller than a block.
@pytest.mark.parametrize(
    ("format", "shape"),
    [
        (_NZ, (40, 20)),
        (_NZ, (2, 5, 33)),
        (3, (5,)),
        (3, (3, 33, 2, 5)),
        (4, (4, 3, 3, 2)),
        (4, (20, 35, 3, 2)),
        (33, (20, 17, 2, 3, 2)),
    ],
)
def test_every_private_format_keeps_the_numbers(format, shape):
    rows = torch.rand(shape)
    stored = torch_npu.npu_format_cast(rows.npu(), format)
    assert torch_npu.get_npu_format(stored) == format
    assert torch.equal(stored.cpu(), rows)
    assert torch.equal((stored * 2).cpu(), rows * 2)
    assert torch.equal(stored.add_(1).cpu(), rows + 1)
