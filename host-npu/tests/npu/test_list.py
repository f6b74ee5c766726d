"""``python -m host_npu --list NAME`` finds CANN's operators by the names of torch_npu's functions."""

import sys

import host_npu
import pytest
import torch
import torch_npu
from host_npu import __main__ as runner
from host_npu import _functions, _operators


def _attention(x: torch.Tensor) -> object:
    return torch_npu.npu_fusion_attention(x, x, x, 2, "BSND")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("npu_rms_norm", lambda x: torch_npu.npu_rms_norm(x, x[0, 0, 0])),
        ("torch_npu.npu_swiglu", torch_npu.npu_swiglu),
        ("npu_geglu", torch_npu.npu_geglu),
        ("npu_dynamic_quant", torch_npu.npu_dynamic_quant),
        ("npu_fusion_attention", _attention),
        ("npu_rotary_mul", lambda x: torch_npu.npu_rotary_mul(x, x[:1, :, :1], x[:1, :, :1])),
        ("npu_linear", lambda x: torch_npu.npu_linear(x[0, 0], x[0, 0], x[0, 0, :, 0])),
        ("npu_dynamic_quant_asymmetric", torch_npu.npu_dynamic_quant_asymmetric),
        (
            "npu_rms_norm_backward",
            lambda x: torch.ops.npu.npu_rms_norm_backward(x, x, x[0, 0, 0], x[..., :1].float()),
        ),
        (
            "npu_rotary_mul_backward",
            lambda x: torch.ops.npu.npu_rotary_mul_backward(x, x, x[:1, :, :1], x[:1, :, :1]),
        ),
    ],
)
def test_what_a_call_launches_is_found_by_its_name(name, call):
    x = torch.rand(2, 4, 2, 16, dtype=torch.float16, device="npu")
    torch.npu.synchronize()
    host_npu.reset()
    call(x)
    torch.npu.synchronize()
    launched = set(host_npu.stats().launches) - {"aclnnInplaceCopy"}
    found = [line.partition(":")[0] for line in _operators.found(name)]
    assert launched and launched <= set(found)


def test_the_operator_of_the_name_comes_first():
    assert _operators.found("npu_rms_norm")[0].startswith("aclnnRmsNorm: computed by a formula, with CANN's documented")
    assert _operators.found("npu_moe_gating_top_k")[0].startswith("aclnnMoeGatingTopK:")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("aclnnAcos", "aclnnAcos: refused"),
        ("npu_quant_lightning_indexer", "aclnnQuantLightningIndexer: refused"),
        ("torch_npu.npu_max", "npu_max: refused, a graph operator (aclop)"),
        ("npu_silu", "Swish: simulated, a graph operator (aclop)"),
        ("npu_apply_adam_w", "ApplyAdamW: simulated, a graph operator (aclop)"),
        ("npu_bert_apply_adam", "ApplyAdamV2: simulated, a graph operator (aclop)"),
        ("Slice", "Slice: simulated, a graph operator (aclop)"),
        ("npu_attn_softmax_", "aclnnSoftmax: computed by a formula, with PyTorch's dtypes and shapes"),
        ("npu_gather_pa_kv_cache_functional", "aclnnGatherPaKvCache: computed by a formula, with PyTorch's dtypes and"),
        ("_npu_paged_attention", "_npu_paged_attention: ATB's PagedAttention, computed by a formula; some options are"),
        ("torch_npu._npu_flash_attention", "_npu_flash_attention: ATB's SelfAttention, computed by a formula; some"),
        ("_npu_quantize_per_tensor", "_npu_quantize_per_tensor: ATB's Elewise, computed by a formula; some options"),
        ("npu_ring_mla", "npu_ring_mla: ATB's RingMLA, computed by a formula; some options are refused"),
        ("_npu_paged_attention_quant", "_npu_paged_attention_quant: refused, an operator of ATB"),
        ("npu_mla_preprocess", "npu_mla_preprocess: refused, an operator of ATB"),
        ("npu_quant_mm_reduce_scatter", "npu_quant_mm_reduce_scatter: refused, as are all products"),
        ("npu_quant_fusion_attention", "aclnnQuantFlashAttentionScore: refused"),
        ("npu_reshape", "npu_reshape: runs, without an operator of CANN"),
        ("npu_fusion_attention_grad_v2", "aclnnFlashAttentionScoreGrad: computed by a formula"),
        ("npu_dropout_backward", "aclnnDropoutDoMask: computed by a formula"),
        ("npu_geglu_grad", "aclnnGeGluV3Backward: computed by a formula"),
        ("npu_roi_alignbk", "aclnnROIAlignBackward: computed by a formula"),
        ("npu_linear_backward", "aclnnMm: computed by a formula"),
        ("_lstm_npu_backward", "aclnnLstmBackward: refused"),
        ("npu_max_backward", "npu_max_backward: refused, a graph operator (aclop)"),
        ("npu_bmm_v2_mat1_backward", "npu_bmm_v2_mat1_backward: refused, a graph operator (aclop)"),
        ("get_npu_format", "get_npu_format: runs, without an operator of CANN"),
        (
            "empty_with_swapped_memory",
            "empty_with_swapped_memory: refused, there are no device addresses of host memory",
        ),
    ],
)
def test_what_is_refused_or_a_graph_operator_is_found_too(name, first):
    assert _operators.found(name)[0].startswith(first)


def test_what_torch_npu_does_not_call_is_found_too():
    assert _operators.found("aclnnApplyFusedEmaAdam") == ["aclnnApplyFusedEmaAdam: simulated with CANN's checks"]


@pytest.mark.parametrize(("soc", "lacks"), [("Ascend910B", False), ("Ascend950", True)])
def test_the_line_says_whether_the_chip_has_a_kernel(soc, lacks):
    [line] = _operators.found("aclnnFusedLinearOnlineMaxSum", soc=soc)
    expected = "aclnnFusedLinearOnlineMaxSum: simulated with CANN's checks"
    assert line == expected + (f", but {soc} has no kernel of it" if lacks else "")


def test_other_names_find_nothing():
    assert _operators.found("npu_no_such_function") == _operators.found("npu_no_such_function_backward") == []


@pytest.mark.parametrize(("name", "own"), [("index_put", "aten.index_put"), ("torch.acos", "aten.acos, aten.acosh")])
def test_names_of_torch_say_that_its_operators_run(name, own):
    assert _operators.found(name)[-1] == f"PyTorch's own operators run on the host NPU all the same: {own}"


def test_the_list_says_of_each_name_what_runs_and_what_does_not_exist(monkeypatch, capsys):
    monkeypatch.setenv("HOST_NPU_SOC", "Ascend310P")
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = ["npu_rms_norm", "npu_silu", "npu_ffn", "npu_nothing"]
    monkeypatch.setattr(sys, "argv", ["host_npu", "--soc", "Ascend310P", "--list", *names])
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 1  # one of them does not exist
    norm, silu, ffn, nothing = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    assert norm[0] == "aclnnRmsNorm: computed by a formula, with CANN's documented dtypes and shapes"
    assert "On Ascend310P torch_npu calls graph operators instead, unless set_compile_mode(jit_compile=False)" in norm
    assert silu[0] == "Swish: simulated, a graph operator (aclop)" and ": computed by a formula" in silu[1]
    assert not any("Off" in line for line in ffn)  # RoundOffNumber contains "ffn", but not as a word
    assert nothing == ["npu_nothing: torch_npu has no such function, and CANN no operator with this in its name"]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older releases lack some of the functions")
def test_every_other_name_is_one_of_torch_npu_and_leads_to_an_operator():
    names = _functions.OTHER_NAMES
    assert [name for name in names if not hasattr(torch_npu, name)] == []
    assert [name for name in names if not _operators.found(name)] == []


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is torch_npu 2.13's")
def test_the_page_of_operators_is_what_the_list_prints(request):
    page = request.config.rootpath / "docs" / "operators.md"
    assert _operators.page() == page.read_text(), "python -m host_npu --list > docs/operators.md"
