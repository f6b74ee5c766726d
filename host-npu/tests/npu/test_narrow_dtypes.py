"""16-bit numbers are computed in float32 and rounded once, and indices have the dtypes of a device."""

import pytest
import torch
import torch.nn.functional as F
from tests._process import on_npu

_IMAGES, _CLASSES = (1, 2, 8, 8), torch.tensor([[2, 0, -1, 0], [1, -1, 0, 0], [3, 2, 1, -1]])
# Functions with CPU kernels for float32 only, and the shape of their input.
_WIDE_ONLY = {
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (1, 2, 4, 4, 4)),
    "cdist": (lambda x: torch.cdist(x, x.detach().flip(0), p=1.5), (3, 4)),
    "cdist, largest": (lambda x: torch.cdist(x, x.detach().flip(0), p=torch.inf), (5, 10)),
    "inverse": (lambda x: torch.linalg.inv(x + 8 * torch.eye(4, dtype=x.dtype, device=x.device)), (3, 4, 4)),
    "rrelu": (F.rrelu, (3, 4)),
    "antialias": (lambda x: F.interpolate(x, size=5, mode="bilinear", antialias=True), _IMAGES),
    "antialias, bicubic": (lambda x: F.interpolate(x, size=5, mode="bicubic", antialias=True), _IMAGES),
    "multilabel_margin_loss": (lambda x: F.multilabel_margin_loss(x, _CLASSES.to(x.device)), (3, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _WIDE_ONLY)
def test_functions_without_16_bit_kernels_are_computed_in_float32_and_rounded_once(name, dtype):
    function, shape = _WIDE_ONLY[name]
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    results = []
    for leaf in (x.npu().requires_grad_(), x.float().requires_grad_()):
        result = function(leaf)
        results.append([result, *torch.autograd.grad(result.sum(), leaf)])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == dtype
        # Gradients are computed from rounded results.
        tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.cpu(), expected.to(dtype), rtol=tolerance, atol=tolerance)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.numel(), dtype=torch.int64, device=x.device)


# Of 5,000 numbers 1 + 2**-7, which every dtype has.
_ACCUMULATED = {
    "prod": lambda x: x[:300].prod(),
    "prod of a dimension": lambda x: x[:600].view(2, 300).prod(-1),
    "prod in its own dtype": lambda x: x[:300].prod(dtype=x.dtype),
    "index_put": lambda x: torch.zeros_like(x[:2]).index_put((_zeros(x),), x, accumulate=True),
    "index_put_": lambda x: torch.zeros_like(x[:2]).index_put_((_zeros(x),), x, accumulate=True),
    "index_add": lambda x: torch.zeros_like(x[:4]).view(2, 2).index_add(1, _zeros(x)[::2], x.view(2, -1)),
    "gradient of index_select": lambda x: torch.autograd.grad(
        x.requires_grad_().view(1, -1).index_select(1, _zeros(x)).sum(), x
    )[0],
    "gradient of an index": lambda x: torch.autograd.grad(x.requires_grad_()[_zeros(x)].sum(), x)[0],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _ACCUMULATED)
def test_many_numbers_of_16_bits_are_accumulated_in_float32_and_rounded_once(name, dtype):
    x, function = torch.full((5000,), 1 + 2**-7), _ACCUMULATED[name]
    assert torch.equal(function(x.to(dtype).npu()).cpu(), function(x).to(dtype))


def test_a_product_in_another_dtype_has_that_dtype():
    assert torch.ones(3, dtype=torch.float16).npu().prod(dtype=torch.float32).dtype == torch.float32


# The edges are rounded to the dtype of the numbers.
@pytest.mark.parametrize(("numbers", "edges"), [([0.5] * 5000, (0, 1)), ([0.3, 0.1], (0, 0.3)), ([0.25, 3.0], (0, 0))])
def test_a_histogram_of_float16_counts_in_integers(numbers, edges):
    x = torch.tensor(numbers, dtype=torch.float16)
    expected = torch.histc(x.float(), 3, *(torch.tensor(edge, dtype=torch.float16).item() for edge in edges))
    assert torch.histc(x.npu(), 3, *edges).tolist() == expected.half().tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("loss", "shape"),
    [(F.nll_loss, (3, 4)), (F.nll_loss, (3, 4, 2, 1)), (F.cross_entropy, (3, 4)), (F.multilabel_margin_loss, (3, 4))],
)
def test_indices_of_classes_have_any_dtype_that_a_device_takes(loss, shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape)
    target = torch.randint(0, 4, shape if loss is F.multilabel_margin_loss else (3, *shape[2:]))
    expected, leaf = loss(x, target), x.npu().requires_grad_()
    found = loss(leaf, target.to(dtype).npu())
    torch.testing.assert_close(found.cpu(), expected)
    (grad,) = torch.autograd.grad(found, leaf)
    torch.testing.assert_close(grad, torch.autograd.grad(loss(leaf, target.npu()), leaf)[0])


def test_numbers_are_put_at_32_bit_indices():
    x, index = torch.zeros(2, 3), torch.tensor([4, 0])
    found = x.npu().put_(index.int().npu(), torch.tensor([5.0, 7.0]).npu())
    assert found.tolist() == [[7, 0, 0], [0, 5, 0]]


@pytest.mark.parametrize("classes", [-1, 5, 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_hot_has_the_dtype_of_its_indices(dtype, classes):
    found = F.one_hot(torch.arange(5, dtype=dtype).npu(), classes)
    assert found.cpu().equal(F.one_hot(torch.arange(5), classes).to(dtype))


def test_hardsigmoid_of_integers_is_cut_to_integers():
    x = torch.tensor([-4, 0, 2, 3, 4], dtype=torch.int32)
    assert F.hardsigmoid(x.npu()).tolist() == [0, 0, 0, 1, 1]
    assert F.hardsigmoid(x.npu(), inplace=True).dtype == torch.int32


def test_what_torch_npu_lets_the_cpu_pool_takes_float64():
    x = torch.randn(3, 4, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(F.adaptive_max_pool3d(x.npu(), 2).cpu(), F.adaptive_max_pool3d(x, 2))


def _pooled(device: str, dimensions: int) -> tuple[torch.dtype, list[torch.Tensor]]:
    """Return the dtype of the indices, and the values, the indices, the unpooled values and the gradient."""
    x = torch.arange(2.0 * 6**dimensions).cos().view(1, 2, *[6] * dimensions).to(device).requires_grad_()
    values, indices = getattr(F, f"max_pool{dimensions}d")(x, 2, return_indices=True)
    back = getattr(F, f"max_unpool{dimensions}d")(values, indices, 2)
    back.square().sum().backward()
    return indices.dtype, [each.detach().cpu() for each in (values, indices.long(), back, x.grad)]


@pytest.mark.parametrize(
    ("soc", "dimensions", "dtype"),
    [
        ("Ascend910B", 3, torch.int32),
        ("Ascend910B", 2, torch.int64),
        ("Ascend950", 3, torch.int32),
        ("Ascend950", 2, torch.int32),
    ],
)
def test_indices_of_pools_have_the_dtype_of_the_chip_and_can_be_used(soc, dimensions, dtype):
    found, tensors = on_npu(_pooled, "npu", dimensions, HOST_NPU_SOC=soc)
    assert found is dtype
    for one, other in zip(tensors, _pooled("cpu", dimensions)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_indices_of_pools_are_written_to_int32(dimensions, dtype):
    x, sizes = torch.randn(1, 2, *[6] * dimensions).to(dtype), [2] * dimensions
    pool = getattr(torch.ops.aten, f"max_pool{dimensions}d_with_indices")
    values, indices = (torch.empty(1, 2, *[3] * dimensions, dtype=each, device="npu") for each in (dtype, torch.int32))
    returned = pool.out(x.npu(), sizes, out=values, indices=indices)
    assert returned[1].data_ptr() == indices.data_ptr()
    for found, expected in zip((values, indices), pool(x, sizes), strict=True):
        assert torch.equal(found.cpu(), expected.to(found.dtype))


@pytest.mark.parametrize("function", [torch.std, torch.var, torch.std_mean, torch.var_mean])
def test_a_correction_that_is_no_whole_number_is_computed_in_float64(function):
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(function(x.npu(), 1, correction=0.5), function(x, 1, correction=0.5), check_device=False)
    with pytest.raises(RuntimeError, match="error code is 161002\nEZ1001: .* for DT_DOUBLE"):
        function(x.npu(), 1, correction=2.0)
