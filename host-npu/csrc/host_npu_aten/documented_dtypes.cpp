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
// All real dtypes except float64.
constexpr Dtypes kNarrow = {at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kLong,
                            at::kShort, at::kChar, at::kByte,     at::kBool};
constexpr Dtypes kReal = {at::kFloat, at::kHalf,  at::kBFloat16, at::kDouble, at::kInt,
                          at::kLong,  at::kShort, at::kChar,     at::kByte,   at::kBool};
constexpr Dtypes kNumbers = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kInt,          at::kLong,
                             at::kShort, at::kChar, at::kByte,     at::kBool,   at::kComplexFloat, at::kComplexDouble};
constexpr Dtypes kExponents = {at::kLong, at::kBool, at::kFloat, at::kHalf, at::kBFloat16};
constexpr Dtypes kRectified = {at::kFloat, at::kHalf, at::kChar, at::kInt, at::kLong, at::kBFloat16, at::kByte};
constexpr Dtypes kDotted = {at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kInt, at::kByte};
constexpr Dtypes kFilled = {at::kFloat, at::kInt, at::kLong, at::kHalf, at::kChar, at::kBool, at::kBFloat16};
constexpr Dtypes kHardSigmoids = {at::kFloat, at::kHalf, at::kInt, at::kBFloat16};
constexpr Dtypes kErrorFunctions = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kBool, at::kLong};
constexpr Dtypes kExponentials = {at::kFloat,        at::kHalf,          at::kBFloat16, at::kDouble,
                                  at::kComplexFloat, at::kComplexDouble, at::kBool,     at::kLong};
constexpr Dtypes kSearched = {at::kDouble, at::kFloat, at::kHalf, at::kByte,
                              at::kChar,   at::kShort, at::kInt,  at::kLong};
constexpr Dtypes kExtremes = {at::kFloat, at::kHalf, at::kLong, at::kBool, at::kBFloat16};
constexpr Dtypes kOrdered = {at::kFloat, at::kHalf, at::kByte, at::kChar,
                             at::kShort, at::kInt,  at::kLong, at::kBFloat16};
constexpr Dtypes kAddcmuls = {at::kFloat, at::kInt,  at::kLong,   at::kHalf,
                              at::kChar,  at::kByte, at::kDouble, at::kBFloat16};
constexpr Dtypes kAddcdivs = {at::kFloat, at::kLong, at::kHalf, at::kDouble, at::kBFloat16};
constexpr Dtypes kInverted = {at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kHalf};
constexpr Dtypes kIndexFilled = {at::kInt, at::kHalf, at::kFloat, at::kLong, at::kBool, at::kBFloat16};
constexpr Dtypes kWithoutBool = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kChar,
                                 at::kShort, at::kInt,  at::kLong,     at::kByte};
constexpr Dtypes kPairs = {at::kHalf, at::kFloat};
constexpr Dtypes kSigned = {at::kDouble,       at::kFloat,         at::kHalf, at::kInt,     at::kLong,
                            at::kComplexFloat, at::kComplexDouble, at::kBool, at::kBFloat16};
constexpr Dtypes kHistograms = {at::kFloat, at::kHalf, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte};
// On the Ascend950.
constexpr Dtypes kRolledOn950 = {at::kFloat, at::kHalf, at::kChar,     at::kByte,  at::kInt,
                                 at::kBool,  at::kLong, at::kBFloat16, at::kShort, at::kComplexFloat};
constexpr Dtypes kExtremesOn950 = {at::kFloat, at::kHalf, at::kLong, at::kBool, at::kBFloat16, at::kInt};
constexpr Dtypes kMovedOn950 = {at::kChar, at::kByte,  at::kShort,  at::kInt,  at::kLong,        at::kBFloat16,
                                at::kHalf, at::kFloat, at::kDouble, at::kBool, at::kComplexHalf, at::kComplexFloat};

struct Document {
    const char* function;  // the documented function of ops-nn, ops-math or ops-cv
    Dtypes dtypes;
    Dtypes on_950 = dtypes;
};

// By PyTorch's operator; also covers its out and in-place variants.
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
        {"aten::repeat_interleave", {"aclnnRepeatInterleave", kNarrow}},
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
        // The document's four dtypes, and those that promote to one of them with such a target.
        {"aten::l1_loss", {"aclnnL1Loss", kNarrow}},
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
        {"aten::sort", {"aclnnSort", kNarrow}},
        {"aten::soft_margin_loss", {"aclnnSoftMarginLoss", kFloats}},
        {"aten::erf", {"aclnnErf", kErrorFunctions}},
        {"aten::log1p", {"aclnnLog1p", kReal}},
        {"aten::logical_not", {"aclnnLogicalNot", kReal}},
        {"aten::addcmul", {"aclnnAddcmul", kAddcmuls}},
        {"aten::addcdiv", {"aclnnAddcdiv", kAddcdivs}},
        {"aten::median", {"aclnnMedian", kOrdered}},
        {"aten::kthvalue", {"aclnnKthvalue", kOrdered}},
        {"aten::logsumexp", {"aclnnLogSumExp", kNarrow}},
        {"aten::histc", {"aclnnHistc", kHistograms}},
        {"aten::roll", {"aclnnRoll", kNarrow, kRolledOn950}},
        {"aten::tril", {"aclnnTril", kReal, kMovedOn950}},
        {"aten::triu", {"aclnnTriu", kReal, kMovedOn950}},
        {"aten::im2col", {"aclnnIm2col", kFloats, kMovedOn950}},
        {"aten::col2im", {"aclnnIm2colBackward", kFloats, kNumbers}},
        {"aten::exp", {"aclnnExp", kExponentials}},
        {"aten::tanh", {"aclnnTanh", kNarrow}},
        {"aten::erfc", {"aclnnErfc", kErrorFunctions}},
        {"aten::erfinv", {"aclnnErfinv", kNarrow}},
        {"aten::nan_to_num", {"aclnnNanToNum", kNarrow}},
        {"aten::max", {"aclnnMaxDim", kExtremes, kExtremesOn950}},
        {"aten::min", {"aclnnMinDim", kExtremes, kExtremesOn950}},
        {"aten::norm", {"aclnnNorm", kFloats}},
        {"aten::linalg_vector_norm", {"aclnnLinalgVectorNorm", kFloats}},
        {"aten::renorm", {"aclnnRenorm", kFloats}},
        {"aten::native_dropout", {"aclnnDropoutDoMask", kFloats}},
        {"aten::threshold", {"aclnnThreshold", kOrdered}},
        {"aten::threshold_backward", {"aclnnThresholdBackward", kRectified}},
        {"aten::elu_backward", {"aclnnEluBackward", kFloats}},
        {"aten::hardtanh_backward", {"aclnnHardtanhBackward", kFloats}},
        {"aten::_softmax_backward_data", {"aclnnSoftmaxBackward", kFloats}},
        {"aten::_log_softmax_backward_data", {"aclnnLogSoftmaxBackward", kFloats}},
        {"aten::_embedding_bag", {"aclnnEmbeddingBag", kFloats}},
        {"aten::_upsample_nearest_exact1d", {"aclnnUpsampleNearestExact1d", kFloats}},
        {"aten::_upsample_nearest_exact2d", {"aclnnUpsampleNearestExact2d", kFloats}},
        {"aten::addr", {"aclnnAddr", kReal}},
        {"aten::addmv", {"aclnnAddmv", kReal}},
        {"aten::masked_scatter", {"aclnnInplaceMaskedScatter", kReal}},
        {"aten::nonzero", {"aclnnNonzero", kReal}},
        {"aten::any", {"aclnnAny", kReal}},
        {"aten::all", {"aclnnAll", kReal}},
        {"aten::normal", {"aclnnInplaceNormal", kReal}},
        {"aten::uniform", {"aclnnInplaceUniform", kWithoutBool}},
        {"aten::cumprod", {"aclnnCumprod", kWithoutBool}},
        {"aten::inverse", {"aclnnInverse", kInverted}},
        {"aten::index_fill", {"aclnnIndexFill", kIndexFilled, kReal}},
        {"aten::sign", {"aclnnSign", kSigned}},
        {"aten::sgn", {"aclnnSign", kSigned}},
        {"aten::frac", {"aclnnFrac", kOrdered}},
        {"aten::eye", {"aclnnEye", kNarrow}},
        {"aten::xlogy", {"aclnnXLogYTensor", kNarrow}},
        {"aten::logaddexp", {"aclnnLogAddExp", kNarrow}},
        {"aten::logaddexp2", {"aclnnLogAddExp2", kNarrow}},
        {"aten::logit", {"aclnnLogit", kFloats}},
        {"aten::_pdist_forward", {"aclnnPdist", kPairs}},
        {"aten::multilabel_margin_loss_forward", {"aclnnMultilabelMarginLoss", kFloats}},
        {"aten::affine_grid_generator", {"aclnnAffineGrid", kFloats}},
        {"aten::searchsorted", {"aclnnSearchSorted", kSearched, kReal}},
        {"aten::bucketize", {"aclnnSearchSorted", kSearched, kReal}},
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

// The dtype of the first NPU tensor, or else of the tensor to create.
std::optional<at::ScalarType> first_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
    for (auto value = stack.end() - count; value != stack.end(); ++value) {
        if (!value->isTensor()) continue;
        const auto& tensor = value->toTensor();
        if (tensor.defined() && tensor.is_privateuseone()) return tensor.scalar_type();
    }
    const auto index = op.schema().argumentIndexWithName("dtype");
    if (!index) return std::nullopt;
    const auto& dtype = torch::jit::peek(stack, *index, op.schema().arguments().size());
    return dtype.isNone() ? at::get_default_dtype_as_scalartype() : dtype.toScalarType();
}

// The numeric value of an argument, if it has one.
std::optional<double> number(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const std::string& name) {
    const auto& schema = op.schema();
    const auto index = schema.argumentIndexWithName(name);
    if (!index) return std::nullopt;
    const auto& value = torch::jit::peek(stack, *index, schema.arguments().size());
    return value.isScalar() ? std::optional(value.toScalar().toDouble()) : std::nullopt;
}

// Whether torch_npu does not call the documented function: for std and var with a fractional correction and logit on
// old chips (computed by the CPU), norms of most orders (a graph operator), and max and min without a dimension.
bool has_other_function(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const auto& name = op.operator_name().name;
    if (name == "aten::logit") return !has_bfloat16();
    if (name == "aten::max" || name == "aten::min") return !op.schema().argumentIndexWithName("dim");
    if (const auto correction = number(op, stack, "correction")) return std::fmod(*correction, 1) != 0;
    const auto order = number(op, stack, name == "aten::norm" ? "p" : "ord");
    return order && !std::isinf(*order) && (*order < 0 || *order > 3 || std::fmod(*order, 1) != 0);
}

// Returns the document of an operator, unless all dtypes of torch are allowed.
const Document* document(std::string_view name) {
    if (name.ends_with('_')) name.remove_suffix(1);
    const auto found = documents().find(name);
    return found == documents().end() || are_torchs() ? nullptr : &found->second;
}

void refuse(const Document& document, at::ScalarType dtype) {
    const auto dtypes = of_chip(document);
    // Dtypes without a name here, such as float8, are documented for some chips only.
    if (std::ranges::find(kNames, dtype, &Name::dtype) == std::end(kNames)) return;
    TORCH_CHECK(std::ranges::find(dtypes, dtype) != dtypes.end(), "call ", document.function,
                " failed, error code is 161002\nEZ1001: Tensor self not implemented for ", of_cann(dtype),
                ", should be in dtype support list [", listed(dtypes), "].\nThat is what CANN's document of ",
                document.function, " says; HOST_NPU_DTYPES=torch computes what PyTorch's CPU computes");
}

}  // namespace

void refuse_undocumented_dtype(std::string_view name, at::ScalarType dtype) {
    if (const auto* const found = document(name)) refuse(*found, dtype);
}

void refuse_undocumented_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const auto* const found = document(op.operator_name().name);
    if (found == nullptr || has_other_function(op, stack)) return;
    if (const auto dtype = first_dtype(op, stack)) refuse(*found, *dtype);
}

}  // namespace host_npu
