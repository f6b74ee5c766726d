"""Optimizer steps and the advance of a decoder on the host NPU."""

import pytest
import torch
import torch_npu
from tests._process import on_npu
from tests._values import refused


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=["", "amsgrad", "maximize"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_adamw_is_adamw(dtype, options):
    start = torch.randn(7, 3).to(dtype)
    on_npu, reference = torch.nn.Parameter(start.npu()), torch.nn.Parameter(start.double())
    optimizers = [
        torch.optim.AdamW([on_npu], lr=0.1, weight_decay=0.3, fused=True, **options),
        torch.optim.AdamW([reference], lr=0.1, weight_decay=0.3, **options),
    ]
    for _ in range(3):
        grad = torch.randn(7, 3).to(dtype)
        on_npu.grad, reference.grad = grad.npu(), grad.double()
        for optimizer in optimizers:
            optimizer.step()
    limit = {torch.float32: 2e-6, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(on_npu.detach().cpu().double(), reference.detach(), rtol=limit, atol=limit)


_OF_TORCH_NPU = {
    "NpuFusedAdam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "NpuFusedAdamW": (torch.optim.AdamW, {"weight_decay": 0.3}),
    "NpuFusedRMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
    "NpuFusedSGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", _OF_TORCH_NPU)
def test_the_optimizers_of_torch_npu_are_torchs(name):
    kind, options = _OF_TORCH_NPU[name]
    starts = [torch.randn(7, 3), torch.randn(5)]
    on_npu = [torch.nn.Parameter(each.npu()) for each in starts]
    references = [torch.nn.Parameter(each.double()) for each in starts]
    optimizers = [getattr(torch_npu.optim, name)(on_npu, lr=0.1, **options), kind(references, lr=0.1, **options)]
    for _ in range(3):
        grads = [torch.randn_like(each) for each in starts]
        for side, optimizer in zip((on_npu, references), optimizers, strict=True):
            # The optimizers keep all gradients in one tensor, to which a backward pass adds.
            optimizer.zero_grad()
            sum((x * grad.to(x)).sum() for x, grad in zip(side, grads, strict=True)).backward()
            optimizer.step()
    for each, reference in zip(on_npu, references, strict=True):
        torch.testing.assert_close(each.detach().cpu().double(), reference.detach(), rtol=1e-5, atol=1e-5)


def _adam_w(state, grad, largest, step, maximize):
    options = (0.9 ** (step - 1), 0.99 ** (step - 1), 0.1, 0.3, 0.9, 0.99, 1e-3, grad, largest, largest is not None)
    torch_npu.npu_apply_adam_w(*options, maximize, out=state)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=["", "amsgrad", "maximize"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_step_of_adamw_by_powers_is_adamw(dtype, options):
    start = torch.randn(7, 3).to(dtype)
    state = [start.npu(), *torch.zeros(2, 7, 3, dtype=dtype).npu()]
    largest = torch.zeros(7, 3, dtype=dtype).npu() if "amsgrad" in options else None
    reference = torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([reference], lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.3, **options)
    for step in (1, 2, 3):
        grad = torch.randn(7, 3).to(dtype)
        reference.grad = grad.double()
        _adam_w(state, grad.npu(), largest, step, "maximize" in options)
        if largest is not None:
            torch.maximum(largest, state[2], out=largest)
        optimizer.step()
    limit = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(state[0].cpu().double(), reference.detach(), rtol=limit, atol=limit)


def _steps_of_adamw():
    """Return a parameter after three steps with the powers that this chip's operator takes."""
    torch.manual_seed(3)
    state, grad = [torch.randn(5).npu(), *torch.zeros(2, 5).npu()], torch.randn(5).npu()
    for step in (1, 2, 3):
        _adam_w(state, grad, torch.ones(5).npu(), step, True)
    return state[0].cpu()


def test_the_ascend950_makes_the_step_by_an_aclnn_function():
    torch.testing.assert_close(on_npu(_steps_of_adamw, HOST_NPU_SOC="Ascend950"), _steps_of_adamw())


def _moments(m, v, grad):
    return m * 0.9 + grad * 0.1, v * 0.99 + grad**2 * 0.01


def _adam(var, m, v, grad, nesterov):
    m, v = _moments(m, v, grad)
    direction = m * 0.9 + grad * 0.1 if nesterov else m
    return var - 0.1 * (1 - 0.99**2) ** 0.5 / (1 - 0.9**2) * direction / (v.sqrt() + 1e-3), m, v


def _bert_adam(var, m, v, grad, norm):
    m, v = _moments(m, v, grad / max(norm, 1))
    return var - 0.1 * (m / (v.sqrt() + 1e-3) + 0.3 * var), m, v


_STEPS = {
    "Adam": (
        _adam,
        False,
        lambda out, grad: torch_npu.npu_apply_adam(0.9**2, 0.99**2, *_RATES, grad, None, None, out=out),
    ),
    "Nesterov": (
        _adam,
        True,
        lambda out, grad: torch_npu.npu_apply_adam(0.9**2, 0.99**2, *_RATES, grad, False, True, out=out),
    ),
    "BERT": (_bert_adam, 0.5, lambda out, grad: torch_npu.npu_bert_apply_adam(*_RATES, grad, 1.0, 0.5, 0.3, out=out)),
    "BERT, clipped": (
        _bert_adam,
        4,
        lambda out, grad: torch_npu.npu_bert_apply_adam(*_RATES, grad, 1.0, 4.0, 0.3, out=out),
    ),
    "BERT, not clipped": (
        _bert_adam,
        1,
        lambda out, grad: torch_npu.npu_bert_apply_adam(*_RATES, grad, -1.0, 4.0, 0.3, out=out),
    ),
}
_RATES = (0.1, 0.9, 0.99, 1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("expected", "option", "step"), _STEPS.values(), ids=_STEPS)
def test_a_step_of_a_graph_operator_is_its_formula(expected, option, step, dtype):
    before = torch.rand(4, 7, 3).to(dtype)
    *state, grad = before.npu()
    step(state, grad)
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    for found, right in zip(state, expected(*before.double(), option), strict=True):
        torch.testing.assert_close(found.cpu().double(), right, rtol=limit, atol=limit)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [((2.0, 4.0, 0.0), "clips to a max_grad_norm of 1 only"), ((-1.0, 0.0, 0.0, None, 1), "adam_mode 0 only")],
)
def test_a_step_whose_document_and_kernel_differ_is_refused(arguments, sentence):
    *state, grad = torch.rand(4, 7).npu()
    with refused(sentence):
        torch_npu.npu_bert_apply_adam(*_RATES, grad, *arguments, out=state)


def test_a_decoder_steps_from_one_token_to_the_next_and_clears_the_padding():
    block_size, lengths = 4, torch.tensor([3, 8, 5])
    tokens, positions, slots = torch.tensor([10, 11, 12]), lengths - 1, torch.tensor([0, 0, 7])
    tables = torch.tensor([[4, 9, 2], [7, 1, 3], [5, 6, 8]])
    on_npu = [each.npu() for each in (tokens, torch.tensor([[21], [22]]), positions, lengths, slots, tables)]
    torch_npu.npu_advance_step_flashattn(*on_npu, 3, 2, block_size)
    assert on_npu[0].tolist() == [21, 22, 0]
    assert on_npu[2].tolist() == [3, 8, 0]
    assert on_npu[3].tolist() == [4, 9, 5]
    # Element 2 of the table's first row, plus the offset of the second row.
    assert on_npu[4].tolist() == [4 * 4 + 3, (2 + 3) * 4 + 0, -1]
