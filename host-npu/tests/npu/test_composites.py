"""Operators on the host NPU have torch's derivatives, whichever kernel computes them."""

import re

import pytest
import torch

_HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key


def _kernel_of_host_npu(name: str, key: str) -> bool:
    """Return whether the host NPU has registered a kernel for an operator."""
    dump = torch._C._dispatch_dump(name)
    return re.search(rf"^{key}: registered at \S*host_npu_aten", dump, re.MULTILINE) is not None


def _computed(name: str, key: str) -> str:
    """Return the kernel that the dispatcher calls for a key."""
    found = re.search(rf"^{key}: (.*)$", torch._C._dispatch_dump_table(name), re.MULTILINE)
    assert found is not None, name
    return found[1]


def _operators() -> list[str]:
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]


def test_the_kernels_of_the_host_npu_are_found():
    assert _kernel_of_host_npu("aten::add.Tensor", "PrivateUse1")
    assert not _kernel_of_host_npu("aten::mse_loss", "PrivateUse1")


def test_no_kernel_hides_the_derivative_of_a_composite():
    hidden = []
    for name in _operators():
        if not _kernel_of_host_npu(name, "PrivateUse1") or not _HAS_KERNEL(name, "CompositeImplicitAutograd"):
            continue
        # Either the composite provides the derivative, or the operator has its own derivative, as on a CPU.
        is_composed = _kernel_of_host_npu(name, "AutogradPrivateUse1")
        is_derived = _HAS_KERNEL(name, "CPU") and _HAS_KERNEL(name, "Autograd")
        if not is_composed and not is_derived:
            hidden.append(name)
    assert hidden == []


def test_every_operator_with_a_derivative_on_a_cpu_has_it_on_an_npu():
    def has_none(kernel: str) -> bool:
        return "[backend fallback]" in kernel

    without = [
        name
        for name in _operators()
        if _kernel_of_host_npu(name, "PrivateUse1")
        and has_none(_computed(name, "AutogradPrivateUse1"))
        and not has_none(_computed(name, "AutogradCPU"))
    ]
    assert without == []


def _covariance(x: torch.Tensor) -> torch.Tensor:
    centered = x - x.mean(1, keepdim=True)
    return centered @ centered.t() / (x.shape[1] - 1)


def _correlation(x: torch.Tensor) -> torch.Tensor:
    covariance = _covariance(x)
    deviation = covariance.diagonal().sqrt()
    return covariance / deviation[:, None] / deviation[None, :]


# Compared with formulas, because torch_npu also replaces the CPU kernel of true_divide, which then has no derivative.
_OPERATORS = {
    "true_divide": (lambda x: torch.true_divide(x, x.flip(1) + 2), lambda x: x / (x.flip(1) + 2)),
    "true_divide_": (lambda x: x.clone().true_divide_(x + 2), lambda x: x / (x + 2)),
    "cov": (torch.cov, _covariance),
    "corrcoef": (torch.corrcoef, _correlation),
    "matmul": (lambda x: torch.matmul(x, x.t()), lambda x: (x[:, None] * x[None]).sum(2)),
    "l1_loss": (lambda x: torch.nn.functional.l1_loss(x, -x), lambda x: (2 * x).abs().mean()),
    "kl_div": (
        lambda x: torch.nn.functional.kl_div(x, x + 2, reduction="sum"),
        lambda x: ((x + 2) * ((x + 2).log() - x)).sum(),
    ),
    "softmax": (lambda x: x.softmax(1).square(), lambda x: (x.exp() / x.exp().sum(1, keepdim=True)).square()),
    "where": (lambda x: torch.where(x > 0.5, x * 2, x.square()), lambda x: (x > 0.5) * x * 2 + (x <= 0.5) * x**2),
    "max": (lambda x: x.max(1).values * 3, lambda x: x.sort(1).values[:, -1] * 3),
    "silu twice": (
        lambda x: torch.autograd.grad(torch.nn.functional.silu(x).sum(), x, create_graph=True)[0],
        lambda x: torch.autograd.grad((x / (1 + (-x).exp())).sum(), x, create_graph=True)[0],
    ),
}


@pytest.mark.parametrize("name", _OPERATORS)
def test_results_and_gradients_are_those_of_the_formula(name):
    operator, formula = _OPERATORS[name]
    values = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    on_npu, on_cpu = values.npu().requires_grad_(), values.clone().requires_grad_()
    result, truth = operator(on_npu), formula(on_cpu)
    torch.testing.assert_close(result.cpu(), truth)
    result.square().sum().backward()
    truth.square().sum().backward()
    torch.testing.assert_close(on_npu.grad.cpu(), on_cpu.grad)


@pytest.mark.parametrize("name", ["cov", "true_divide", "matmul", "softmax"])
def test_composites_are_computed_in_inference_mode(name):
    operator, formula = _OPERATORS[name]
    with torch.inference_mode():
        values = torch.rand(3, 5)
        torch.testing.assert_close(operator(values.npu()).cpu(), formula(values))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
def test_a_dense_tensor_becomes_a_sparse_one_of_the_npu(layout):
    dense = torch.tensor([[0.0, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, 3.0]])
    sparse = dense.npu().to_sparse(layout=layout, blocksize=(2, 2) if layout == torch.sparse_bsr else None)
    assert (sparse.device.type, sparse.layout) == ("npu", layout)
    assert torch.equal(sparse.to_dense().cpu(), dense)


@pytest.mark.parametrize(
    "call",
    [
        lambda generator: torch.rand(3, generator=generator),
        lambda generator: torch.randn(3, generator=generator),
        lambda generator: torch.zeros(3).uniform_(generator=generator),
        lambda generator: torch.randperm(3, generator=generator),
        lambda generator: torch.multinomial(torch.ones(3), 1, generator=generator),
    ],
    ids=["rand", "randn", "uniform_", "randperm", "multinomial"],
)
def test_cpu_tensors_take_no_generator_of_the_npu(call):
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'npu'"):
        call(torch.Generator("npu"))
