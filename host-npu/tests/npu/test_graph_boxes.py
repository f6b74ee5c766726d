"""The graph operators (aclop) of boxes give the results of formulas in float64, in both compile modes."""

import math

import pytest
import torch
import torch_npu
from tests._values import refused
from torch import Tensor

pytestmark = [
    pytest.mark.usefixtures("jit_compile"),
    pytest.mark.parametrize("jit_compile", [False, True], indirect=True),
]
DTYPES = [torch.float32, torch.float16]


def boxes(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return centers, widths and heights [4, count]; most of the boxes overlap."""
    return (torch.rand(4, count) * 4 + 1).to(dtype)


def sides(boxes: Tensor, trans: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the left, upper, right and lower sides."""
    x, y, w, h = boxes
    return (x - w / 2, y - h / 2, x + w / 2, y + h / 2) if trans else (x, y, w, h)


def overlaps(kind: str, box: Tensor, truth: Tensor, trans: bool = True, of_truth: bool = False) -> Tensor:
    """Return the overlaps of boxes in pairs, [N]."""
    (left, top, right, bottom), (left2, top2, right2, bottom2) = sides(box, trans), sides(truth, trans)
    width = (torch.minimum(right, right2) - torch.maximum(left, left2)).clamp(0)
    inter = width * (torch.minimum(bottom, bottom2) - torch.maximum(top, top2)).clamp(0)
    area, area2 = (right - left) * (bottom - top), (right2 - left2) * (bottom2 - top2)
    union = area2 if of_truth else area + area2 - inter
    hull_width = torch.maximum(right, right2) - torch.minimum(left, left2)
    hull_height = torch.maximum(bottom, bottom2) - torch.minimum(top, top2)
    iou = inter / union
    if kind == "giou":
        return iou - (hull_width * hull_height - union) / (hull_width * hull_height)
    distance = ((left + right - left2 - right2) ** 2 + (top + bottom - top2 - bottom2) ** 2) / 4
    diou = iou - distance / (hull_width**2 + hull_height**2)
    if kind == "diou":
        return diou
    angles = torch.atan((right2 - left2) / (bottom2 - top2)) - torch.atan((right - left) / (bottom - top))
    v = 4 / math.pi**2 * angles**2
    return diou - (v / (1 - iou + v)).detach() * v


def call(kind: str, box: Tensor, truth: Tensor, trans: bool = True, mode: int = 0) -> Tensor:
    flag = (True,) if kind == "ciou" else ()
    return getattr(torch_npu, f"npu_{kind}")(box, truth, trans, False, mode, *flag).flatten()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "trans"), [("giou", True), *((k, t) for k in ("diou", "ciou") for t in (True, False))]
)
def test_overlaps_in_pairs_and_their_gradients(kind, trans, dtype):
    torch.manual_seed(0)
    given = [boxes(40, dtype), boxes(40, dtype)]
    if not trans:
        given = [torch.stack(sides(each)) for each in given]
    weights = torch.rand(40).to(dtype)
    on_npu = [each.npu().requires_grad_() for each in given]
    in_double = [each.double().requires_grad_() for each in given]
    found, expected = call(kind, *on_npu, trans), overlaps(kind, *in_double, trans)
    (found * weights.npu()).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip((found, *(x.grad for x in on_npu)), (expected, *(x.grad for x in in_double)), strict=True):
        torch.testing.assert_close(one.cpu(), other.to(dtype))


@pytest.mark.parametrize("kind", ["diou", "ciou"])
def test_the_mode_1_divides_by_the_area_of_the_truth(kind):
    box, truth = boxes(8), boxes(8)
    found = call(kind, box.npu(), truth.npu(), mode=1)
    torch.testing.assert_close(found.cpu(), overlaps(kind, box.double(), truth.double(), of_truth=True).float())


@pytest.mark.parametrize(("kind", "expected"), [("giou", [0.0, 0.0]), ("diou", [-0.5, -0.25])])
def test_equal_boxes_give_the_gradients_of_their_common_sides_to_the_truth(kind, expected):
    box, truth = (torch.tensor([[1.0], [1.0], [2.0], [4.0]]).npu().requires_grad_() for _ in range(2))
    call(kind, box, truth).sum().backward()
    assert box.grad is not None and truth.grad is not None
    # Of the areas, only the union of 8 depends on the box; the width adds 4 / 8 to it, and as much to GIoU's hull.
    assert box.grad.cpu()[2:, 0].tolist() == expected and torch.equal(truth.grad, -box.grad)


def test_ciou_of_equal_boxes_divides_0_by_0_as_in_cann():
    assert call("ciou", *(torch.ones(4, 1).npu(),) * 2).isnan().all()


@pytest.mark.parametrize("kind", ["giou", "diou", "ciou"])
def test_empty_boxes_have_no_nan(kind):
    box = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 2.0]])
    truth = torch.tensor([[3.0, 1.0], [3.0, 1.0], [0.0, 2.0], [0.0, 2.0]])
    assert call(kind, box.npu(), truth.npu()).isfinite().all()
    assert call(kind, boxes(0).npu(), boxes(0).npu()).shape == (0,)


REFUSALS = {
    "is_cross must be false, but it is true": lambda x: torch_npu.npu_ciou(x, x, True, True, 0, True),
    "mode must be iou, but it is iof": lambda x: call("diou", x.requires_grad_(), x, mode=1).sum().backward(),
    "input 0 must be float32 or float16, but it has aclDataType 27": lambda x: call("diou", x.bfloat16(), x.bfloat16()),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_what_cann_does_not_take_is_refused(sentence):
    with refused(sentence):
        REFUSALS[sentence](boxes(4).npu())
        torch.npu.synchronize()


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("function", [torch_npu.npu_iou, torch_npu.npu_ptiou])
def test_iou_is_computed_of_every_pair_in_float16(function, mode):
    box, truth = (torch.stack(sides(boxes(count))).t() for count in (5, 3))
    found = function(box.npu(), truth.npu(), mode).cpu()
    low = torch.maximum(box[:, :2].half(), truth[:, None, :2].half()).double()
    high = torch.minimum(box[:, 2:].half(), truth[:, None, 2:].half()).double()
    inter = (high - low).clamp(0).prod(-1)
    # CANN adds epsilon to the sizes of the boxes only.
    area, of_truth = ((x.half()[:, 2:].double() - x.half()[:, :2].double() + 0.01).prod(-1) for x in (box, truth))
    union = of_truth[:, None] if mode == 1 else area + of_truth[:, None] - inter
    torch.testing.assert_close(found, (inter / union).half().float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_boxes_are_encoded_as_offsets_and_decoded(dtype):
    torch.manual_seed(0)
    box, truth = (torch.stack(sides(boxes(6) + 10)).t().to(dtype) for _ in range(2))
    means, stds = [0.1, 0.2, 0.0, -0.1], [0.5, 0.25, 2.0, 1.0]
    encoded = torch_npu.npu_bounding_box_encode(box.npu(), truth.npu(), *means, *stds).cpu()
    center, size, of_truth, other = (
        f(x.half().double())
        for x in (box, truth)
        for f in (lambda x: (x[:, :2] + x[:, 2:]) / 2, lambda x: x[:, 2:] - x[:, :2] + 1)
    )
    offsets = torch.cat([(of_truth - center) / size, (other / size).log()], 1)
    expected = (offsets - torch.tensor(means).double()) / torch.tensor(stds).double()
    assert encoded.dtype == dtype
    torch.testing.assert_close(encoded, expected.half().to(dtype), rtol=1e-3, atol=1e-5)
    decoded = torch_npu.npu_bounding_box_decode(box.npu(), encoded.npu(), *means, *stds, (100, 100), 0.016).cpu()
    torch.testing.assert_close(decoded, truth, rtol=2e-3, atol=1e-2)


def test_decoded_boxes_are_clipped():
    box, offsets = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]]), torch.tensor([[5.0, 6.0, 7.0, 8.0]] * 2)
    found = torch_npu.npu_bounding_box_decode(box.npu(), offsets.npu(), *[0] * 4, *[1] * 4, (10, 12), 0.1)
    # 30 wide and high around (17, 21), and around (19, 23), in an image of 12 by 10 pixels.
    assert found.cpu().tolist() == [[2.5, 6.5, 11.0, 9.0], [4.5, 8.5, 11.0, 9.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_boxes_are_encoded_in_cells_of_a_grid(dtype):
    box, truth = (torch.stack(sides(boxes(20))).t().to(dtype) for _ in range(2))
    truth[0, 2] = truth[0, 0]  # an empty box
    stride = torch.arange(1, 21, dtype=torch.int32)
    found = torch_npu.npu_yolo_boxes_encode(box.npu(), truth.npu(), stride.npu(), False).cpu()
    (left, top, right, bottom), (left2, top2, right2, bottom2) = box.double().t(), truth.double().t()
    x, y = ((left2 + right2 - left - right) / 2 / stride + 0.5, (top2 + bottom2 - top - bottom) / 2 / stride + 0.5)
    w, h = (right2 - left2) / (right - left), (bottom2 - top2) / (bottom - top)
    expected = torch.stack([x.clamp(1e-6, 1 - 1e-6), y.clamp(1e-6, 1 - 1e-6), w.clamp(1e-6).log(), h.clamp(1e-6).log()])
    torch.testing.assert_close(found, expected.t().to(dtype), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_mark_the_cells_of_the_centers_of_boxes(dtype):
    # Of 2 rows and 3 columns of 10 by 20 pixels: the cells (1, 0) and (0, 2), the second for a box beyond the image.
    box = torch.tensor([[0.0, 20.0, 8.0, 30.0], [50.0, -40.0, 60.0, 0.0], [2.0, 25.0, 9.0, 28.0]], dtype=dtype)
    found = torch_npu.npu_anchor_response_flags(box.npu(), [2, 3], [10, 20], 2).cpu()
    assert found.dtype == torch.uint8 and found.view(2, 3, 2)[..., 0].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert torch.equal(found[::2], found[1::2])
