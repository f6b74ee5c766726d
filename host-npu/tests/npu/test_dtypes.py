"""Dtypes that CANN does not document for some operators are refused, as by a device."""

import functools

import pytest
import torch
import torch.nn.functional as F
from tests._process import error_of, on_npu

_CLASSES = torch.tensor([[2, 0, -1, 0], [1, -1, 0, 0], [3, 2, 1, -1]])
_CALLS = {
    "aclnnMatmul": lambda x: x @ x.T,
    "aclnnMm": lambda x: torch.mm(x, x.T),
    "aclnnBatchMatMul": lambda x: torch.bmm(x[None], x[None].mT),
    "aclnnAddmm": lambda x: torch.addmm(x[:, :3], x, x.T),
    "aclnnBaddbmm": lambda x: torch.baddbmm(x[None, :, :3], x[None], x[None].mT),
    "aclnnConvolution": lambda x: F.conv1d(x[None], x[None, :, :2]),
    "aclnnGelu": F.gelu,
    "aclnnSilu": F.silu,
    "aclnnHardswish": F.hardswish,
    "aclnnHardsigmoid": F.hardsigmoid,
    "aclnnRelu": torch.relu,
    "aclnnSoftplus": F.softplus,
    "aclnnMish": F.mish,
    "aclnnSmoothL1Loss": lambda x: F.smooth_l1_loss(x, x.flip(0)),
    "aclnnBatchNorm": lambda x: F.batch_norm(x, None, None, training=True),
    "aclnnGroupNorm": lambda x: F.group_norm(x, 2),
    "aclnnAvgPool2d": lambda x: F.avg_pool2d(x[None], 2),
    "aclnnAdaptiveAvgPool2d": lambda x: F.adaptive_avg_pool2d(x[None], 2),
    "aclnnMaxPool2dWithMask": lambda x: F.max_pool2d(x[None], 2),
    "aclnnLayerNorm": lambda x: F.layer_norm(x, (4,)),
    "aclnnExpm1": torch.expm1,
    "aclnnRepeatInterleave": lambda x: x.repeat_interleave(2, 1),
    "aclnnDot": lambda x: torch.dot(x[0], x[1]),
    "aclnnInplaceMaskedFillScalar": lambda x: x.masked_fill(x > 1, 2),
    "aclnnMv": lambda x: torch.mv(x, x[0]),
    "aclnnAddbmm": lambda x: torch.addbmm(x[:, :3], x[None], x[None].mT),
    "aclnnPrelu": lambda x: F.prelu(x, x[0, :1]),
    "aclnnLogSigmoidForward": F.logsigmoid,
    "aclnnSoftshrink": F.softshrink,
    "aclnnHardshrink": F.hardshrink,
    "aclnnCelu": F.celu,
    "aclnnNLLLoss": lambda x: F.nll_loss(x, torch.arange(3, device=x.device)),
    "aclnnNLLLoss2d": lambda x: F.nll_loss(x[None, :, None], torch.zeros(1, 1, 4, dtype=torch.long, device=x.device)),
    "aclnnL1Loss": lambda x: F.l1_loss(x, x.flip(0)),
    "aclnnKlDiv": lambda x: F.kl_div(x, x.sigmoid(), reduction="batchmean"),
    "aclnnBinaryCrossEntropyWithLogits": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid()),
    "aclnnAvgPool3d": lambda x: F.avg_pool3d(x[None, None], (1, 2, 2)),
    "aclnnAdaptiveAvgPool3d": lambda x: F.adaptive_avg_pool3d(x[None, None], (1, 2, 2)),
    "aclnnMaxPool3dWithArgmax": lambda x: F.max_pool3d(x[None, None], (1, 2, 2)),
    "aclnnUpsampleLinear1d": lambda x: F.interpolate(x[None], scale_factor=2, mode="linear"),
    "aclnnUpsampleBicubic2d": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bicubic"),
    "aclnnLerp": lambda x: x.lerp(x.flip(0), 0.25),
    "aclnnStd": lambda x: x.std(1),
    "aclnnVarCorrection": lambda x: x.var(1),
    "aclnnVarMean": lambda x: torch.var_mean(x, 1)[0],
    "aclnnStdMeanCorrection": lambda x: torch.std_mean(x, 1)[0],
    "aclnnSort": lambda x: x.sort(1)[0],
    "aclnnSoftMarginLoss": lambda x: F.soft_margin_loss(x, x.sign().detach()),
    "aclnnRoll": lambda x: x.roll(1, 1),
    "aclnnMedian": lambda x: x.median(1)[0],
    "aclnnKthvalue": lambda x: x.kthvalue(2, 1)[0],
    "aclnnIm2col": lambda x: F.unfold(x[None, None], 2),
    "aclnnLogSumExp": lambda x: x.logsumexp(1),
    "aclnnHistc": lambda x: x.histc(4),
    "aclnnTanh": torch.tanh,
    "aclnnNanToNum": torch.nan_to_num,
    "aclnnMaxDim": lambda x: x.max(1)[0],
    "aclnnMinDim": lambda x: x.min(1)[0],
    "aclnnErfinv": lambda x: torch.erfinv(x / 9),
    "aclnnRenorm": lambda x: x.renorm(2, 0, 1),
    "aclnnThreshold": lambda x: F.threshold(x, 0.1, 2.0),
    "aclnnThresholdBackward": lambda x: torch.ops.aten.threshold_backward(x, x, 0.1),
    "aclnnIm2colBackward": lambda x: F.fold(x.t()[None], (2, 4), 2),
    "aclnnEmbeddingBag": lambda x: torch._embedding_bag(
        x, torch.arange(3, device=x.device), torch.tensor([0], device=x.device)
    )[0],
    "aclnnLinalgVectorNorm": lambda x: x.norm(),
    "aclnnNorm": lambda x: F.pairwise_distance(x, x.flip(0)),
    "aclnnUpsampleNearestExact1d": lambda x: F.interpolate(x[None], scale_factor=2, mode="nearest-exact"),
    "aclnnUpsampleNearestExact2d": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="nearest-exact"),
    "aclnnFrac": torch.frac,
    "aclnnXLogYTensor": lambda x: torch.xlogy(x, x.abs()),
    "aclnnLogAddExp": lambda x: torch.logaddexp(x, x.flip(0)),
    "aclnnLogAddExp2": lambda x: torch.logaddexp2(x, x.flip(0)),
    "aclnnLogit": lambda x: torch.logit(x, 0.1),
    "aclnnPdist": F.pdist,
    "aclnnMultilabelMarginLoss": lambda x: F.multilabel_margin_loss(x, _CLASSES.to(x.device)),
    "aclnnAffineGrid": lambda x: F.affine_grid(x[None, :2, :3], (1, 1, 2, 2), align_corners=False),
    "aclnnIndexFill": lambda x: x.index_fill(1, torch.tensor([0, 2], device=x.device), 3),
    "aclnnEye": lambda x: torch.eye(3, 4, dtype=x.dtype, device=x.device),
}

# Operators that support float64.
_OF_FLOAT64 = {
    "aclnnErf": torch.erf,
    "aclnnAddcmul": lambda x: torch.addcmul(x, x, x),
    "aclnnAddcdiv": lambda x: torch.addcdiv(x, torch.ones(3, 4).to(x.device), torch.ones(3, 4).to(x.device)),
    "aclnnLog1p": torch.log1p,
    "aclnnLogicalNot": torch.logical_not,
    "aclnnTril": torch.tril,
    "aclnnTriu": torch.triu,
    "aclnnExp": torch.exp,
    "aclnnErfc": torch.erfc,
    "aclnnSearchSorted": lambda x: torch.bucketize(x, x[0]),
    "aclnnSign": torch.sign,
    "aclnnCumprod": lambda x: x.cumprod(1),
    "aclnnInverse": lambda x: torch.inverse(x[:1, :1] + 1),
    "aclnnAddr": lambda x: torch.addr(x, x[:, 0], x[0]),
    "aclnnAddmv": lambda x: torch.addmv(x[:, 0], x, x[0]),
    "aclnnInplaceMaskedScatter": lambda x: x.masked_scatter((x == x[0, 0]), x),
    "aclnnNonzero": torch.nonzero,
    "aclnnAny": lambda x: x.any(1),
    "aclnnAll": torch.all,
    "aclnnInplaceNormal": lambda x: x.clone().normal_(2, 0),
    "aclnnInplaceUniform": lambda x: x.clone().uniform_(2, 2),
}

# Gradients of functions that support float64.
_GRADIENTS = {
    "aclnnSoftmaxBackward": lambda x: x.softmax(-1),
    "aclnnLogSoftmaxBackward": lambda x: x.log_softmax(-1),
    "aclnnEluBackward": F.elu,
    "aclnnHardtanhBackward": F.relu6,
}

# By CANN's and PyTorch's names: integers and complex numbers that PyTorch's CPU kernels support, but CANN does not.
_OTHER_DTYPES = [
    ("aclnnMatmul", "DT_INT64", torch.int64),
    ("aclnnMm", "DT_INT32", torch.int32),
    ("aclnnBatchMatMul", "DT_INT8", torch.int8),
    ("aclnnAddmm", "DT_INT16", torch.int16),
    ("aclnnBaddbmm", "DT_UINT8", torch.uint8),
    ("aclnnDot", "DT_INT64", torch.int64),
    ("aclnnExpm1", "DT_INT32", torch.int32),
    ("aclnnRelu", "DT_INT16", torch.int16),
    ("aclnnInplaceMaskedFillScalar", "DT_UINT8", torch.uint8),
    ("aclnnConvolution", "DT_INT64", torch.int64),
    ("aclnnErf", "DT_INT32", torch.int32),
    ("aclnnExp", "DT_INT32", torch.int32),
    ("aclnnErfc", "DT_INT32", torch.int32),
    ("aclnnMaxDim", "DT_INT32", torch.int32),
    ("aclnnSearchSorted", "DT_BFLOAT16", torch.bfloat16),
    ("aclnnTanh", "DT_COMPLEX64", torch.complex64),
    ("aclnnAddcmul", "DT_INT16", torch.int16),
    ("aclnnAddcmul", "DT_COMPLEX64", torch.complex64),
    ("aclnnAddcdiv", "DT_INT32", torch.int32),
    ("aclnnAddcdiv", "DT_COMPLEX64", torch.complex64),
    ("aclnnRoll", "DT_COMPLEX64", torch.complex64),
    ("aclnnIm2col", "DT_BOOL", torch.bool),
    ("aclnnLogSumExp", "DT_COMPLEX64", torch.complex64),
    ("aclnnLog1p", "DT_COMPLEX128", torch.complex128),
    ("aclnnLogicalNot", "DT_COMPLEX64", torch.complex64),
    ("aclnnTril", "DT_COMPLEX64", torch.complex64),
    ("aclnnTriu", "DT_COMPLEX64", torch.complex64),
    ("aclnnSign", "DT_INT8", torch.int8),
    ("aclnnIndexFill", "DT_INT16", torch.int16),
    ("aclnnLogit", "DT_INT32", torch.int32),
    ("aclnnCumprod", "DT_BOOL", torch.bool),
    ("aclnnInverse", "DT_BFLOAT16", torch.bfloat16),
    ("aclnnEye", "DT_COMPLEX64", torch.complex64),
    ("aclnnLogAddExp", "DT_COMPLEX64", torch.complex64),
    ("aclnnAddr", "DT_COMPLEX64", torch.complex64),
    ("aclnnAddmv", "DT_COMPLEX64", torch.complex64),
    ("aclnnInplaceMaskedScatter", "DT_COMPLEX64", torch.complex64),
    ("aclnnNonzero", "DT_COMPLEX64", torch.complex64),
    ("aclnnAny", "DT_COMPLEX64", torch.complex64),
    ("aclnnAll", "DT_COMPLEX64", torch.complex64),
    ("aclnnInplaceNormal", "DT_COMPLEX64", torch.complex64),
    ("aclnnInplaceUniform", "DT_COMPLEX64", torch.complex64),
]

# Chips, PyTorch's dtypes, and CANN's names of the dtypes that an operator refuses.
_OF_CHIPS = [
    ("Ascend950", torch.complex64, {"aclnnRoll": "", "aclnnTril": "", "aclnnTriu": "", "aclnnIm2col": ""}),
    ("Ascend950", torch.float64, {"aclnnRoll": "DT_DOUBLE", "aclnnTril": "", "aclnnTriu": "", "aclnnIm2col": ""}),
    ("Ascend950", torch.float64, {"aclnnIndexFill": "", "aclnnLogit": "DT_DOUBLE"}),
    ("Ascend910", torch.float64, {"aclnnIndexFill": "DT_DOUBLE", "aclnnLogit": ""}),
    ("Ascend950", torch.complex128, {"aclnnTril": "DT_COMPLEX128", "aclnnIm2col": "DT_COMPLEX128"}),
    ("Ascend950", torch.int32, {"aclnnMaxDim": "", "aclnnExp": "DT_INT32"}),
    ("Ascend950", torch.bfloat16, {"aclnnSearchSorted": ""}),
    ("Ascend950", torch.bool, {"aclnnExpm1": "DT_BOOL", "aclnnRoll": "", "aclnnIm2col": ""}),
    ("Ascend910B", torch.bool, {"aclnnExpm1": "", "aclnnRoll": "", "aclnnIm2col": "DT_BOOL"}),
]


def _assert_refused(name: str, dtype: str, x: torch.Tensor) -> None:
    message = (
        rf"call {name} failed, error code is 161002\nEZ1001: Tensor self not implemented for {dtype}, should be in"
    )
    with pytest.raises(RuntimeError, match=message):
        (_CALLS | _OF_FLOAT64)[name](x.npu())


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with a gradient"])
def test_an_operator_refuses_float64_with_the_code_and_the_list_of_the_device(name, requires_grad):
    x = torch.randn(3, 4, dtype=torch.float64)
    _assert_refused(name, "DT_DOUBLE", x.requires_grad_(requires_grad))
    x = x.detach()
    # The queue continues, and float32 is computed.
    torch.testing.assert_close(_CALLS[name](x.float().npu()).cpu(), _CALLS[name](x.float()))


@pytest.mark.parametrize(("name", "of_cann", "dtype"), _OTHER_DTYPES)
def test_an_operator_refuses_dtypes_that_its_document_does_not_list(name, of_cann, dtype):
    _assert_refused(name, of_cann, torch.ones(3, 4, dtype=dtype))


def _errors(names: list[str], dtype: torch.dtype) -> dict[str, str]:
    x = torch.ones(3, 4).to("npu", dtype)
    calls = _CALLS | _OF_FLOAT64
    return {name: error_of(functools.partial(calls[name], x)) for name in names}


@pytest.mark.parametrize(("soc", "dtype", "refused"), _OF_CHIPS)
def test_a_chip_refuses_the_dtypes_that_the_document_lists_for_others(soc, dtype, refused):
    errors = on_npu(_errors, list(refused), dtype, HOST_NPU_SOC=soc)
    words = {
        name: f"{name} failed, error code is 161002\nEZ1001: Tensor self not implemented for {of_cann},"
        for name, of_cann in refused.items()
    }
    assert all((words[name] in error) if refused[name] else error == "" for name, error in errors.items()), errors


def test_the_list_of_a_chip_without_bfloat16_has_none():
    errors = on_npu(_errors, ["aclnnGelu"], torch.float64, HOST_NPU_SOC="Ascend910")
    assert "[DT_FLOAT,DT_FLOAT16]" in errors["aclnnGelu"]


@pytest.mark.parametrize("name", _OF_FLOAT64)
def test_float64_that_a_document_lists_is_computed(name):
    x = torch.rand(3, 4, dtype=torch.float64)
    torch.testing.assert_close(_OF_FLOAT64[name](x.npu()).cpu(), _OF_FLOAT64[name](x))


@pytest.mark.parametrize("name", _GRADIENTS)
def test_a_gradient_refuses_float64_that_its_function_takes(name):
    x = torch.randn(3, 4, dtype=torch.float64)
    leaf = x.npu().requires_grad_()
    result = _GRADIENTS[name](leaf)
    torch.testing.assert_close(result.cpu(), _GRADIENTS[name](x))
    with pytest.raises(RuntimeError, match=f"call {name} failed, error code is 161002\nEZ1001: .* for DT_DOUBLE"):
        result.sum().backward()


def test_a_new_tensor_is_refused_in_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RuntimeError, match="call aclnnEye failed, error code is 161002\nEZ1001: .* for DT_DOUBLE"):
            torch.eye(3, device="npu")
        assert torch.eye(2, dtype=torch.float32, device="npu").tolist() == [[1, 0], [0, 1]]
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_no_call_of_the_document_takes_float64():
    x = torch.randn(3, 4, dtype=torch.float64)
    for function in (torch.max, torch.min, lambda x: x.norm(1.5), lambda x: F.pairwise_distance(x, x.flip(0), 1.5)):
        torch.testing.assert_close(function(x.npu()).cpu(), function(x))


def test_dropout_refuses_float64_if_there_is_something_to_drop():
    x = torch.randn(3, 4, dtype=torch.float64).npu()
    with pytest.raises(
        RuntimeError, match="call aclnnDropoutDoMask failed, error code is 161002\nEZ1001: .* for DT_DOUBLE"
    ):
        F.dropout(x)
    assert F.dropout(x, training=False).equal(x) and F.dropout(x, 0).equal(x) and not F.dropout(x, 1).any()


def test_integers_that_a_document_lists_are_computed():
    x = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    for name in ("aclnnDot", "aclnnRelu", "aclnnInplaceMaskedFillScalar", "aclnnRepeatInterleave"):
        assert _CALLS[name](x.npu()).cpu().equal(_CALLS[name](x))


def test_integers_beside_floats_are_those_floats():
    x, target = torch.arange(4, dtype=torch.int32), torch.rand(4)
    torch.testing.assert_close(F.l1_loss(x.npu(), target.npu()).cpu(), F.l1_loss(x, target))


def test_complex_numbers_are_added_but_not_indexed():
    x = torch.randn(3, 4, dtype=torch.complex64)
    assert (x.npu() + 1).cpu().equal(x + 1)
    with pytest.raises(RuntimeError, match="call aclnnIndex failed, error code is 161002\nEZ1001: .* for DT_COMPLEX64"):
        x.npu()[torch.tensor([0, 1]).npu()]
    with pytest.raises(RuntimeError, match="call aclnnAdd failed, error code is 161002\nEZ1001: .* for DT_COMPLEX32"):
        x.to(torch.complex32).npu() + 1


def test_what_an_ai_cpu_computes_takes_float64():
    x = torch.randn(3, 4, dtype=torch.float64)
    assert x.npu().softmax(-1).cpu().equal(x.softmax(-1))
    assert (x.npu() + x.npu())[torch.tensor([0, 2]).npu()].cpu().equal((x + x)[[0, 2]])
