"""jit_compile=True: the graph operators (aclop) that torch_npu then calls give the CPU's results."""

import re
from collections.abc import Callable

import pytest
import torch
import torch_npu
from host_npu import _libraries
from tests._values import refused
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("jit_compile")


def _rows(x: Tensor) -> Tensor:
    return torch.tensor([2, 0, 2], device=x.device)


def masked_softmax(x: Tensor) -> Tensor:
    """Return npu_scaled_masked_softmax of a matrix, or its formula on the CPU."""
    x = x[None, None]
    mask = torch.ones(x.shape, dtype=torch.bool, device=x.device).triu(1)
    if x.device.type == "npu":
        return torch_npu.npu_scaled_masked_softmax(x, mask, 0.5, False)
    return torch.softmax((x * 0.5).masked_fill(mask, -10000), -1)


def on_npu(function: Callable[[Tensor], Tensor], on_cpu: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a call of a function of torch_npu, or of its replacement on the CPU."""
    return lambda x: (function if x.device.type == "npu" else on_cpu)(x)


# Calls on a tensor [3, 4] with values between 0 and 1, by the graph operators that they become.
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "Transpose": lambda x: x.t().contiguous(),
    "Cast": lambda x: x.to(torch.float16),
    "Slice": lambda x: x[:, 1:3].contiguous(),
    "StridedSlice, of every second row": lambda x: x[::2].contiguous(),
    "StridedSlice, of one column": lambda x: x.select(1, -1).contiguous(),
    "AsStrided": lambda x: x[:1].expand(3, 4).contiguous(),
    "AsStrided, from an offset": lambda x: x.diagonal(1).contiguous(),
    "ViewCopy": lambda x: torch.zeros(4, 5, device=x.device).t()[1:4].copy_(x),
    "BroadcastTo": lambda x: torch.stack([x, x]).sum((0, 2)),
    "MseLoss": lambda x: functional.mse_loss(x, x.detach().flip(0)),
    "MseLoss, MseLossGrad of each": lambda x: functional.mse_loss(x, x.detach().flip(0), reduction="none"),
    "BinaryCrossEntropy, BinaryCrossEntropyGrad": lambda x: functional.binary_cross_entropy(x, x.detach().flip(0)),
    "BinaryCrossEntropy, weighted": lambda x: functional.binary_cross_entropy(
        x, x.detach().flip(0), x.detach(), reduction="sum"
    ),
    "GatherV2, EmbeddingDenseGrad": lambda x: functional.embedding(_rows(x), x),
    "EmbeddingDenseGrad, scaled": lambda x: functional.embedding(_rows(x), x, padding_idx=0, scale_grad_by_freq=True),
    "ScaledMaskedSoftmax, ScaledMaskedSoftmaxGrad": lambda x: masked_softmax(x.float().repeat(11, 8)[:32]),
    "Identity": lambda x: torch_npu.npu_format_cast(x, 29) if x.device.type == "npu" else x,
    "Fill, OneHotD, SoftmaxCrossEntropyWithLogits": on_npu(
        lambda x: torch_npu.npu_softmax_cross_entropy_with_logits(
            x, torch_npu.npu_one_hot(_rows(x).int(), -1, 4, 0.9, 0.1 / 3).to(x.dtype)
        ),
        lambda x: functional.cross_entropy(x, _rows(x), label_smoothing=0.4 / 3, reduction="none"),
    ),
    "Swish, SwishGrad": on_npu(torch_npu.npu_silu, functional.silu),
    "Mish, MishGrad": on_npu(torch_npu.npu_mish, functional.mish),
    "ConfusionTransposeD": on_npu(
        lambda x: torch_npu.npu_confusion_transpose(x, (1, 2, 0), (3, 2, 2), False),
        lambda x: x.view(3, 2, 2).permute(1, 2, 0),
    ),
    "ConfusionTransposeD, first": on_npu(
        lambda x: torch_npu.npu_confusion_transpose(x, (1, 0), (2, 6), True), lambda x: x.t().reshape(2, 6)
    ),
}
# Functions of torch_npu without gradients.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "npu_silu": (torch_npu.npu_silu, functional.silu),
    "npu_silu_": (lambda x: torch_npu.npu_silu_(x.clone()), functional.silu),
    "npu_transpose": (lambda x: torch_npu.npu_transpose(x.t(), (1, 0)), lambda x: x),
    "npu_broadcast": (lambda x: torch_npu.npu_broadcast(x, (2, 3, 4)), lambda x: x.expand(2, 3, 4)),
    "npu_one_hot": (
        lambda x: torch_npu.npu_one_hot(_rows(x).int(), depth=2),
        lambda x: torch.eye(4)[_rows(x)][:, :2],
    ),
    "npu_slice": (lambda x: torch_npu.npu_slice(x, [1, 0], [2, 3]), lambda x: x[1:, :3]),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _value_and_gradient(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x.requires_grad_()
    value = call(x)
    value.float().square().sum().backward()
    assert x.grad is not None
    return [each.detach().cpu() for each in (value, x.grad)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_gives_what_the_cpu_gives(call, dtype):
    torch.manual_seed(0)
    x = torch.rand(3, 4).to(dtype)
    found = _value_and_gradient(call, x.npu())
    # The CPU rounds 16-bit losses more than once, so the expected value is computed in float32.
    expected = _value_and_gradient(call, x.float())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to(dtype), other.to(dtype))


@pytest.mark.parametrize("jit_compile", [False, True], indirect=True)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_runs_in_both_modes(function):
    x, (on_npu, expected) = torch.rand(3, 4) - 0.5, FUNCTIONS[function]
    torch.testing.assert_close(on_npu(x.npu()).cpu(), expected(x))


def test_every_simulated_graph_operator_is_called_here():
    named = {word for name in CALLS for word in re.findall(r"\w+", name) if word[0].isupper()}
    named |= {"ApplyAdamD", "ApplyAdamV2", "ApplyAdamW"}  # tested in test_optimizers.py
    named |= {"Iou", "GIoU", "GIoUGrad", "DIoU", "DIoUGrad", "CIoU", "CIoUGrad"}  # tested in test_graph_boxes.py
    named |= {"BoundingBoxDecode", "BoundingBoxEncode", "YoloBoxesEncode", "AnchorResponseFlags"}
    named |= {"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "ReduceSum"}  # in test_graph_convolutions.py
    named |= {"DeformableOffsets", "DeformableOffsetsGrad"}
    assert named == set(_libraries.graph_operators())


def test_a_model_trains_as_without_jit_compile():
    def losses(jit_compile: bool) -> list[float]:
        torch.npu.set_compile_mode(jit_compile=jit_compile)
        torch.manual_seed(0)
        tokens = torch.randint(7, (8, 4)).npu()
        model = torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Flatten(), torch.nn.Linear(32, 7)).npu()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = functional.cross_entropy(model(tokens), tokens[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False) == losses(True)


def test_an_operator_that_is_not_simulated_is_refused_by_its_name_and_the_program_goes_on():
    with refused(r"does not simulate the graph operator \(aclop\) of ArgMaxWithValue"):
        torch_npu.npu_max(torch.ones(4, 2, dtype=torch.float16, device="npu"), 1)
    assert (torch.ones(3, 2, device="npu").t() + 1).sum().item() == 12


def test_an_option_that_is_not_simulated_is_refused_by_its_name():
    x = torch.rand(3, 4, device="npu")
    with refused("StridedSlice: its attribute new_axis_mask is not 0"):
        torch_npu.npu_indexing(x, [0, 0], [2, 2], [1, 1], new_axis_mask=1)
    assert (x - x + 1).sum().item() == 12


def test_an_index_out_of_range_is_an_error_of_the_stream():
    weight = torch.rand(3, 4, device="npu")
    with refused(r"GatherV2 failed on stream \d+ of device 0: index out of range in self$"):
        functional.embedding(torch.tensor([3], device="npu"), weight)


@pytest.mark.parametrize(("format", "shape"), [(29, (40, 20)), (3, (5,)), (4, (20, 35, 3, 2)), (33, (20, 17, 2, 3, 2))])
@pytest.mark.usefixtures("private_formats")
def test_copies_of_a_private_format_keep_the_format_and_the_numbers(format, shape):
    rows = torch.rand(shape)
    stored = torch_npu.npu_format_cast(rows.npu(), format)
    copied = stored.clone()
    assert torch_npu.get_npu_format(copied) == format and torch.equal(copied.cpu(), rows)
    assert torch.equal(stored.half().cpu(), rows.half())
