#include "host_npu_aten/documented_dtypes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "opapi/chip.h"

namespace host_npu {
namespace {

struct Name {
    at::ScalarType dtype;
    const char* of_cann;
};

constexpr Name kNames[] = {{at::kFloat, "DT_FLOAT"},
                           {at::kHalf, "DT_FLOAT16"},
                           {at::kBFloat16, "DT_BFLOAT16"},
                           {at::kDouble, "DT_DOUBLE"},
                           {at::kChar, "DT_INT8"},
                           {at::kByte, "DT_UINT8"},
                           {at::kShort, "DT_INT16"},
                           {at::kInt, "DT_INT32"},
                           {at::kLong, "DT_INT64"},
                           {at::kBool, "DT_BOOL"},
                           {at::kComplexHalf, "DT_COMPLEX32"},
                           {at::kComplexFloat, "DT_COMPLEX64"},
                           {at::kComplexDouble, "DT_COMPLEX128"}};

using Dtypes = std::initializer_list<at::ScalarType>;

constexpr Dtypes kFloats = {at::kFloat, at::kHalf, at::kBFloat16};
constexpr Dtypes kReal = {at::kFloat, at::kHalf,  at::kBFloat16, at::kDouble, at::kInt,
                          at::kLong,  at::kShort, at::kChar,     at::kByte,   at::kBool};
constexpr Dtypes kNumbers = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kInt,          at::kLong,
                             at::kShort, at::kChar, at::kByte,     at::kBool,   at::kComplexFloat, at::kComplexDouble};
constexpr Dtypes kRepeated = {at::kByte, at::kChar, at::kShort,    at::kInt,  at::kLong,
                              at::kBool, at::kHalf, at::kBFloat16, at::kFloat};
constexpr Dtypes kExponents = {at::kLong, at::kBool, at::kFloat, at::kHalf, at::kBFloat16};
constexpr Dtypes kRectified = {at::kFloat, at::kHalf, at::kChar, at::kInt, at::kLong, at::kBFloat16, at::kByte};
constexpr Dtypes kDotted = {at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kInt, at::kByte};
constexpr Dtypes kFilled = {at::kFloat, at::kInt, at::kLong, at::kHalf, at::kChar, at::kBool, at::kBFloat16};
constexpr Dtypes kHardSigmoids = {at::kFloat, at::kHalf, at::kInt, at::kBFloat16};
constexpr Dtypes kSorted = {at::kHalf,  at::kFloat, at::kBFloat16, at::kByte, at::kChar,
                            at::kShort, at::kInt,   at::kLong,     at::kBool};
// The document's four, and what becomes one of them beside a target of such a dtype.
constexpr Dtypes kDifferences = {at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                                 at::kShort, at::kChar, at::kByte,     at::kBool};
constexpr Dtypes kErrorFunctions = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kBool, at::kLong};
constexpr Dtypes kOrdered = {at::kFloat, at::kHalf, at::kByte, at::kChar,
                             at::kShort, at::kInt,  at::kLong, at::kBFloat16};
constexpr Dtypes kAddcmuls = {at::kFloat, at::kInt,  at::kLong,   at::kHalf,
                              at::kChar,  at::kByte, at::kDouble, at::kBFloat16};
constexpr Dtypes kAddcdivs = {at::kFloat, at::kLong, at::kHalf, at::kDouble, at::kBFloat16};
constexpr Dtypes kLogSumExps = {at::kFloat, at::kInt,  at::kLong, at::kHalf,    at::kShort,
                                at::kChar,  at::kByte, at::kBool, at::kBFloat16};
constexpr Dtypes kHistograms = {at::kFloat, at::kHalf, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte};
constexpr Dtypes kRolled = {at::kFloat, at::kHalf, at::kChar,     at::kByte, at::kInt,
                            at::kBool,  at::kLong, at::kBFloat16, at::kShort};
// Of the Ascend950.
constexpr Dtypes kRolledOn950 = {at::kFloat, at::kHalf, at::kChar,     at::kByte,  at::kInt,
                                 at::kBool,  at::kLong, at::kBFloat16, at::kShort, at::kComplexFloat};
constexpr Dtypes kMovedOn950 = {at::kChar, at::kByte,  at::kShort,  at::kInt,  at::kLong,        at::kBFloat16,
                                at::kHalf, at::kFloat, at::kDouble, at::kBool, at::kComplexHalf, at::kComplexFloat};

struct Document {
    const char* function;  // and document of it in ops-nn, ops-math or ops-cv
    Dtypes dtypes;
    Dtypes on_950 = dtypes;
};

// PyTorch's operators, without and with out and in place, by the name of the first two.
const std::unordered_map<std::string_view, Document>& documents() {
    static const auto& all = *new std::unordered_map<std::string_view, Document>{
        {"aten::mm", {"aclnnMm", kFloats}},
        {"aten::bmm", {"aclnnBatchMatMul", kFloats}},
        {"aten::linear", {"aclnnMatmul", kFloats}},
        {"aten::matmul", {"aclnnMatmul", kFloats}},
        {"aten::dot", {"aclnnDot", kDotted}},
        {"aten::masked_fill", {"aclnnInplaceMaskedFillScalar", kFilled}},
        {"aten::gelu", {"aclnnGelu", kFloats}},
        {"aten::native_layer_norm", {"aclnnLayerNorm", kFloats}},
        {"aten::expm1", {"aclnnExpm1", kExponents, kFloats}},
        {"aten::repeat_interleave", {"aclnnRepeatInterleave", kRepeated}},
        {"aten::index", {"aclnnIndex", kReal}},
        {"aten::add", {"aclnnAdd", kNumbers}},
        {"aten::addmm", {"aclnnAddmm", kFloats}},
        {"aten::baddbmm", {"aclnnBaddbmm", kFloats}},
        {"aten::convolution", {"aclnnConvolution", kFloats}},
        {"aten::silu", {"aclnnSilu", kFloats}},
        {"aten::hardswish", {"aclnnHardswish", kFloats}},
        {"aten::relu", {"aclnnRelu", kRectified}},
        {"aten::hardsigmoid", {"aclnnHardsigmoid", kHardSigmoids}},
        {"aten::softplus", {"aclnnSoftplus", kFloats}},
        {"aten::mish", {"aclnnMish", kFloats}},
        {"aten::smooth_l1_loss", {"aclnnSmoothL1Loss", kFloats}},
        {"aten::native_batch_norm", {"aclnnBatchNorm", kFloats}},
        {"aten::native_group_norm", {"aclnnGroupNorm", kFloats}},
        {"aten::avg_pool2d", {"aclnnAvgPool2d", kFloats}},
        {"aten::_adaptive_avg_pool2d", {"aclnnAdaptiveAvgPool2d", kFloats}},
        {"aten::max_pool2d_with_indices", {"aclnnMaxPool2dWithMask", kFloats}},
        {"aten::mv", {"aclnnMv", kFloats}},
        {"aten::addbmm", {"aclnnAddbmm", kFloats}},
        {"aten::_prelu_kernel", {"aclnnPrelu", kFloats}},
        {"aten::log_sigmoid_forward", {"aclnnLogSigmoidForward", kFloats}},
        {"aten::softshrink", {"aclnnSoftshrink", kFloats}},
        {"aten::hardshrink", {"aclnnHardshrink", kFloats}},
        {"aten::celu", {"aclnnCelu", kFloats}},
        {"aten::nll_loss_forward", {"aclnnNLLLoss", kFloats}},
        {"aten::nll_loss2d_forward", {"aclnnNLLLoss2d", kFloats}},
        {"aten::l1_loss", {"aclnnL1Loss", kDifferences}},
        {"aten::kl_div", {"aclnnKlDiv", kFloats}},
        {"aten::binary_cross_entropy_with_logits", {"aclnnBinaryCrossEntropyWithLogits", kFloats}},
        {"aten::avg_pool3d", {"aclnnAvgPool3d", kFloats}},
        {"aten::_adaptive_avg_pool3d", {"aclnnAdaptiveAvgPool3d", kFloats}},
        {"aten::max_pool3d_with_indices", {"aclnnMaxPool3dWithArgmax", kFloats}},
        {"aten::upsample_linear1d", {"aclnnUpsampleLinear1d", kFloats}},
        {"aten::upsample_bicubic2d", {"aclnnUpsampleBicubic2d", kFloats}},
        {"aten::lerp", {"aclnnLerp", kFloats}},
        {"aten::std", {"aclnnStd", kFloats}},
        {"aten::var", {"aclnnVarCorrection", kFloats}},
        {"aten::var_mean", {"aclnnVarMean", kFloats}},
        {"aten::std_mean", {"aclnnStdMeanCorrection", kFloats}},
        {"aten::sort", {"aclnnSort", kSorted}},
        {"aten::soft_margin_loss", {"aclnnSoftMarginLoss", kFloats}},
        {"aten::erf", {"aclnnErf", kErrorFunctions}},
        {"aten::log1p", {"aclnnLog1p", kReal}},
        {"aten::logical_not", {"aclnnLogicalNot", kReal}},
        {"aten::addcmul", {"aclnnAddcmul", kAddcmuls}},
        {"aten::addcdiv", {"aclnnAddcdiv", kAddcdivs}},
        {"aten::median", {"aclnnMedian", kOrdered}},
        {"aten::kthvalue", {"aclnnKthvalue", kOrdered}},
        {"aten::logsumexp", {"aclnnLogSumExp", kLogSumExps}},
        {"aten::histc", {"aclnnHistc", kHistograms}},
        {"aten::roll", {"aclnnRoll", kRolled, kRolledOn950}},
        {"aten::tril", {"aclnnTril", kReal, kMovedOn950}},
        {"aten::triu", {"aclnnTriu", kReal, kMovedOn950}},
        {"aten::im2col", {"aclnnIm2col", kFloats, kMovedOn950}},
    };
    return all;
}

bool are_torchs() {
    static const bool asked_for = [] {
        const char* const value = std::getenv("HOST_NPU_DTYPES");
        return value != nullptr && std::string_view(value) == "torch";
    }();
    return asked_for;
}

std::string_view of_cann(at::ScalarType dtype) { return std::ranges::find(kNames, dtype, &Name::dtype)->of_cann; }

Dtypes of_chip(const Document& document) { return soc() == Soc::Ascend950 ? document.on_950 : document.dtypes; }

std::string listed(Dtypes dtypes) {
    std::string names;
    for (const auto dtype : dtypes) {
        if (dtype == at::kBFloat16 && !has_bfloat16()) continue;
        names.append(names.empty() ? "" : ",").append(of_cann(dtype));
    }
    return names;
}

// The dtype of the first tensor that is an NPU's.
std::optional<at::ScalarType> first_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
    for (auto value = stack.end() - count; value != stack.end(); ++value) {
        if (!value->isTensor()) continue;
        const auto& tensor = value->toTensor();
        if (tensor.defined() && tensor.is_privateuseone()) return tensor.scalar_type();
    }
    return std::nullopt;
}

// Whether std or var is given a correction that is no whole number, which torch_npu passes on to the CPU.
bool has_fractional_correction(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const auto& schema = op.schema();
    const auto index = schema.argumentIndexWithName("correction");
    if (!index) return false;
    const auto& correction = torch::jit::peek(stack, *index, schema.arguments().size());
    return correction.isDouble() && std::fmod(correction.toDouble(), 1) != 0;
}

}  // namespace

void refuse_undocumented_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    std::string_view name = op.operator_name().name;
    if (name.ends_with('_')) name.remove_suffix(1);
    const auto found = documents().find(name);
    if (found == documents().end() || are_torchs()) return;
    const auto dtype = first_dtype(op, stack);
    const auto* const function = found->second.function;
    const auto dtypes = of_chip(found->second);
    // What has no name here, such as float8, the documents list for some chips only.
    if (!dtype || std::ranges::find(kNames, *dtype, &Name::dtype) == std::end(kNames)) return;
    if (std::ranges::find(dtypes, *dtype) != dtypes.end() || has_fractional_correction(op, stack)) return;
    TORCH_CHECK(false, "call ", function, " failed, error code is 161002\nEZ1001: Tensor self not implemented for ",
                of_cann(*dtype), ", should be in dtype support list [", listed(dtypes),
                "].\nThat is what CANN's document of ", function,
                " says; HOST_NPU_DTYPES=torch computes what PyTorch's CPU computes");
}

}  // namespace host_npu
