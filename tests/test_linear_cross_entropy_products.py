"""linear_cross_entropy: its large products on a CPU, which do not use torch.mm."""

from collections import Counter
from types import SimpleNamespace

from torch_aclnn_ops import _cpu_extension, explain
from torch_aclnn_ops import functional as ours
from torch_aclnn_ops.ops import _chunks

import pytest
import torch
from host_npu.testing import run

from tests._contract import Maker
from tests._modes import Calls

HAS_UNITS = _cpu_extension.has_bfloat16_units()  # determined by the machine, not by the extension
needs_units = pytest.mark.skipif(not HAS_UNITS, reason="needs a CPU with fast bfloat16 instructions")
needs_kernel = pytest.mark.skipif(
    _cpu_extension.cpu_capability() != "AVX512" or "avx512_bf16" not in _cpu_extension._first_cpu()["flags"],
    reason="needs a CPU with bfloat16 instructions, fast or not",
)


@pytest.fixture
def every_product_is_large(monkeypatch):
    monkeypatch.setattr(_chunks, "_FEWEST_MULTIPLICATIONS", 1)


def _tensors(dtype, rows=6, features=8, classes=50):
    make = Maker(dtype)
    input, head = make.normal(rows, features).requires_grad_(), make.normal(classes, features).requires_grad_()
    return input, head, make.index(classes, rows)


def _products_of_a_step(dtype, features=8, **options):
    input, head, target = _tensors(dtype, features=features)
    with Calls() as calls:
        ours.linear_cross_entropy(input, head, target, **options)
    counts = Counter(operator.overloadpacket.__name__ for operator in calls.operators)
    return {name: counts[name] for name in ("linear_cross_entropy_logits", "mm", "addmm", "addmm_") if name in counts}


@needs_units
@pytest.mark.usefixtures("every_product_is_large")
def test_large_bfloat16_logits_are_those_of_the_compiled_kernel():
    assert _products_of_a_step(torch.bfloat16, chunk_size=100) == {"linear_cross_entropy_logits": 1, "mm": 2}
    assert _products_of_a_step(torch.bfloat16, chunk_size=4) == {"linear_cross_entropy_logits": 2, "mm": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_products_use_torch(dtype):
    products = _products_of_a_step(dtype, chunk_size=6)
    assert set(products) <= {"mm", "addmm_"} and sum(products.values()) == 3


@pytest.mark.usefixtures("every_product_is_large")
@pytest.mark.parametrize("reason", ["an odd number of features", "disabled", "oneDNN does not support them"])
def test_bfloat16_logits_without_the_kernel_use_torch(monkeypatch, reason):
    if reason.startswith("oneDNN"):
        monkeypatch.setattr(_cpu_extension, "why_no_bfloat16_products", lambda: reason)
    with torch.backends.mkldnn.flags(enabled=reason != "disabled"):
        features = 7 if reason.startswith("an odd") else 8
        assert "linear_cross_entropy_logits" not in _products_of_a_step(torch.bfloat16, features)


@pytest.mark.usefixtures("every_product_is_large")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_explain_shows_native_bfloat16_instructions(dtype):
    line = explain(ours.linear_cross_entropy, *_tensors(dtype), chunk_size=4)
    has_logits = HAS_UNITS and dtype == torch.bfloat16
    assert ("; logits use native bfloat16 instructions" in line) == has_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 100},
        {"softcap": 5.0, "temperature": 0.5, "lse_square_scale": 0.1},
        {"reduction": "none", "weight": torch.linspace(0.5, 2, 20_000)},
        {"label_smoothing": 0.1, "linear_bias": torch.linspace(-1, 1, 20_000)},
    ],
    ids=["chunks", "softcap, temperature and z-loss", "class weights, none", "bias and label smoothing"],
)
def test_large_products_in_chunks_and_blocks_are_as_exact_as_small_ones(monkeypatch, dtype, options):
    input, head, target = _tensors(dtype, rows=301, features=70, classes=20_000)  # two blocks of the head
    target[::3] = -100
    options = {name: one.to(dtype) if isinstance(one, torch.Tensor) else one for name, one in options.items()}
    results = []
    for fewest in (1, 2**62):
        monkeypatch.setattr(_chunks, "_FEWEST_MULTIPLICATIONS", fewest)
        loss = ours.linear_cross_entropy(input, head, target, **options)
        results.append((loss, *torch.autograd.grad(loss.sum(), (input, head))))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-6, atol=1e-6)
    for large, small in zip(results[0][1:], results[1][1:], strict=True):
        rounding = torch.finfo(dtype).eps
        assert (large - small).abs().max() <= (4 * rounding + 1e-5) * small.abs().max()


SHAPES = [(1, 1, 2), (3, 5, 4), (257, 130, 66), (256, 128, 512), (300, 1001, 514), (5, 7, 1030), (0, 4, 2), (4, 0, 2)]


@needs_kernel
@pytest.mark.parametrize("margin", [2, 3])
@pytest.mark.parametrize(("rows", "classes", "features"), SHAPES)
def test_the_logits_kernel_accumulates_in_float32_and_writes_only_its_output(rows, classes, features, margin):
    make = Maker(torch.bfloat16)
    # Neither aligned nor dense, like slices of a flat parameter.
    input = make.normal(rows, features + 6)[:, 3 : 3 + features]
    weight = make.normal(classes, features + margin)[:, 1 : 1 + features]
    buffer = torch.full((rows, classes + 9), 7.0)
    torch.ops.torch_aclnn_ops.linear_cross_entropy_logits(input, weight, buffer[:, 4 : 4 + classes])
    truth = input.double() @ weight.double().T
    # A sum of n numbers in any order has an error of at most n roundings of the sum of magnitudes.
    bound = features * torch.finfo(torch.float32).eps * (input.double().abs() @ weight.double().abs().T)
    assert ((buffer[:, 4 : 4 + classes] - truth).abs() <= bound).all()
    assert buffer[:, :4].eq(7).all() and buffer[:, 4 + classes :].eq(7).all()


@needs_kernel
def test_the_logits_kernel_passes_opcheck():
    make = Maker(torch.bfloat16)
    arguments = (make.normal(4, 8), make.normal(6, 8), torch.zeros(4, 6))
    torch.library.opcheck(torch.ops.torch_aclnn_ops.linear_cross_entropy_logits.default, arguments)


@pytest.mark.parametrize(
    ("input", "weight", "out", "sentence"),
    [
        ((4, 8, "bfloat16"), (6, 7, "bfloat16"), (4, 6, "float32"), r"an even number of features.* \[6, 7\]"),
        ((4, 7, "bfloat16"), (6, 8, "bfloat16"), (4, 6, "float32"), r"input must have .* shape \[4, 8\]"),
        ((4, 8, "float32"), (6, 8, "bfloat16"), (4, 6, "float32"), "input must have dtype BFloat16"),
        ((4, 8, "float32"), (6, 8, "float32"), (4, 6, "float32"), "weight must have dtype BFloat16.* Float"),
        ((4, 8, "bfloat16"), (6, 8, "bfloat16"), (4, 5, "float32"), r"out must have .* shape \[4, 6\]"),
        ((4, 8, "bfloat16"), (6, 8, "bfloat16"), (4, 6, "bfloat16"), "out must have dtype Float"),
    ],
)
def test_the_logits_kernel_raises_for_unsupported_inputs(input, weight, out, sentence):
    assert _cpu_extension.why_unavailable() is None
    tensors = (torch.zeros(*shape, dtype=getattr(torch, dtype)) for *shape, dtype in (input, weight, out))
    with pytest.raises(ValueError, match=sentence):
        torch.ops.torch_aclnn_ops.linear_cross_entropy_logits(*tensors)


_COMPILED_FOR = f"torch_aclnn_ops is compiled for torch {torch.__version__.partition('+')[0]}\0"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "it was not built"),
        ("of older sources", "it does not record the versions it was compiled for; install torch_aclnn_ops again"),
        ("torch_aclnn_ops is compiled for torch 1.0.0\0", "it was compiled for torch 1.0.0, but torch"),
        (_COMPILED_FOR, "it cannot be loaded and must be rebuilt"),
    ],
)
def test_an_extension_that_is_missing_or_incompatible_is_not_loaded(monkeypatch, tmp_path, content, reason):
    broken = tmp_path / "_cpu.so"
    broken.write_text(content or "")
    spec = content and _cpu_extension.importlib.util.spec_from_file_location("_cpu", broken)
    monkeypatch.setattr(_cpu_extension.importlib.util, "find_spec", lambda name: spec)
    assert _cpu_extension.why_unavailable.__wrapped__().startswith(reason)


@pytest.mark.parametrize(
    ("vendor", "flags", "capability", "is_fast"),
    [
        ("AuthenticAMD", "fma avx512_bf16", "AVX512", True),
        ("GenuineIntel", "fma avx512_bf16 amx_tile", "AVX512", True),
        ("GenuineIntel", "fma avx512_bf16", "AVX512", False),
        ("AuthenticAMD", "fma avx2", "AVX512", False),
        ("AuthenticAMD", "fma avx512_bf16", "AVX2", False),
        ("", "", "AVX512", False),
    ],
)
def test_bfloat16_instructions_are_used_where_they_are_fast(monkeypatch, vendor, flags, capability, is_fast):
    monkeypatch.setattr(_cpu_extension, "cpu_capability", lambda: capability)
    monkeypatch.setattr(_cpu_extension, "_first_cpu", lambda: {"vendor_id": vendor, "flags": flags} if vendor else {})
    assert _cpu_extension.has_bfloat16_units() is is_fast


def test_bfloat16_products_need_fast_instructions(monkeypatch):
    monkeypatch.setattr(_cpu_extension, "has_bfloat16_units", lambda: False)
    reason = _cpu_extension.why_no_bfloat16_products.__wrapped__()
    assert reason == "the CPU has no fast bfloat16 instructions"


def test_bfloat16_products_are_disabled_if_a_trial_is_wrong(monkeypatch):
    wrong = SimpleNamespace(linear_cross_entropy_logits=lambda input, weight, out: out.zero_())
    monkeypatch.setattr(torch.ops, "torch_aclnn_ops", wrong)
    assert _cpu_extension._why_products_fail() == "oneDNN computes wrong results on this CPU"


def _why_no_bfloat16_products(device):
    return _cpu_extension.why_no_bfloat16_products()


@needs_units
def test_bfloat16_products_are_disabled_if_onednn_does_not_support_them():
    [reason] = run(_why_no_bfloat16_products, 1, backend="", environment={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert reason.startswith("oneDNN does not support them: ")
