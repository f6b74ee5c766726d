// Products of int8 matrices, and the 64-bit encoding of their scales.
#include <algorithm>

#include "host_npu_formulas/mx_quantization.h"
#include "host_npu_formulas/quantization.h"
#include "opapi/chip.h"

namespace host_npu {

Tensor scale_of(const AnyTensor& scale) {
    if (scale.scalar_type() != at::kLong) return widened(scale);
    const auto low = scale.bitwise_and(0xFFFFE000L);
    return low.to(at::kInt).view(at::kFloat);
}

Tensor offset_of(const AnyTensor& scale) {
    if (scale.scalar_type() != at::kLong) return at::zeros({});
    // A signed 9-bit number from bit 37.
    return scale.__lshift__(18).__rshift__(55);
}

namespace {

// Encodes the float32 scale's upper 19 bits (truncated or rounded), a 1 in bit 46, and the offset in the 9 bits below.
void trans_quant_param(const AnyTensor& scale, const OptionalTensor& offset, std::int64_t rounding, const Out& out) {
    TORCH_CHECK(scale.scalar_type() == at::kFloat, "scale has dtype ", scale.scalar_type(), " instead of float32");
    TORCH_CHECK(rounding == 0 || rounding == 1, "round_mode is ", rounding, " instead of 0, which cuts off, or 1");
    const auto whole_bits = scale.contiguous().view(at::kInt).to(at::kLong) + (rounding == 1 ? 0x1000 : 0);
    auto bits = whole_bits.bitwise_and(0xFFFFE000L).bitwise_or(1L << 46);
    if (offset) {
        const auto whole = offset->round().clamp(-256, 255).to(at::kLong);
        bits = bits.bitwise_or(whole.bitwise_and(0x1FF) * (1L << 37));
    }
    out = bits;
}
const Formula<"aclnnTransQuantParamV3", trans_quant_param> scale_to_bits;

void trans_quant_param_v2(const AnyTensor& scale, const OptionalTensor& offset, const Out& out) {
    trans_quant_param(scale, offset, 0, out);
}
const Formula<"aclnnTransQuantParamV2", trans_quant_param_v2> scale_to_bits_v2;

void require_absent(const OptionalAnyTensor& tensor, const char* name) {
    TORCH_CHECK(!tensor || tensor->numel() == 0, "the host NPU has no ", name, " of a quantized product");
}

// A valid combination of dtypes; a bias may be absent.
struct QuantizedCombination {
    at::ScalarType out;
    std::vector<bool> has_token_scale;
    std::vector<at::ScalarType> scales, biases;
};

void require_combination(bool has_token_scale, at::ScalarType scale, const OptionalAnyTensor& bias,
                         at::ScalarType out) {
    using enum at::ScalarType;
    static const std::vector<QuantizedCombination> of_a2_and_a3{
        {Half, {false}, {Long}, {Int}},
        {Half, {true}, {Float}, {Int, Half, Float}},
        {BFloat16, {false, true}, {Float, BFloat16}, {Int, BFloat16, Float}},
        {Int, {false}, {Float, BFloat16}, {Int}},
        {Char, {false}, {Long}, {Int}},
    };
    const auto has = [](const auto& choices, auto one) { return std::ranges::find(choices, one) != choices.end(); };
    const auto is_allowed = [&](const QuantizedCombination& row) {
        return row.out == out && has(row.has_token_scale, has_token_scale) && has(row.scales, scale) &&
               (!bias || has(row.biases, bias->scalar_type()));
    };
    if (!is_a2_or_a3() || std::ranges::any_of(of_a2_and_a3, is_allowed)) return;
    TORCH_CHECK(false, "these dtypes cannot be combined: ", has_token_scale ? "x1Scale float32, x2Scale " : "x2Scale ",
                name_of(scale), bias ? ", bias " + name_of(bias->scalar_type()) : "", ", out ", name_of(out));
}

// The encoding of groups of 1 row, 1 column and 32 summands.
constexpr std::int64_t kMxGroups = (std::int64_t{1} << 32) + (1 << 16) + kMxBlock;

// The product of matrices in blocks of 32 elements with a scale each.
void product_of_blocks(const AnyTensor& x1, const AnyTensor& x2, const OptionalTensor& x1_scale, const AnyTensor& scale,
                       const OptionalAnyTensor& bias, bool transpose1, bool transpose2, const Out& out) {
    require_mx();
    require_factors(x1, x2);
    TORCH_CHECK(!transpose1 && !transpose2, "the host NPU transposes matrices in blocks as views only");
    TORCH_CHECK(x1.dim() == 2 && x2.dim() == 2 && x1.size(1) == x2.size(0), "matrices in blocks have shapes ",
                x1.sizes(), " and ", x2.sizes(), " instead of [M, K] and [K, N]");
    TORCH_CHECK(x1_scale && scale.scalar_type() == at::kFloat8_e8m0fnu,
                "matrices in blocks need x1Scale and x2Scale of dtype float8_e8m0fnu");
    TORCH_CHECK(!bias || bias->scalar_type() == at::kFloat, "bias has dtype ", bias ? name_of(bias->scalar_type()) : "",
                " instead of float32");
    TORCH_CHECK(out.dtype() != at::kChar && out.dtype() != at::kInt, "out has dtype ", name_of(out.dtype()),
                " instead of float16, bfloat16 or float32");
    const auto left = from_blocks(x1, *x1_scale, 1), right = from_blocks(x2, scale, 0);
    const auto y = at::matmul(left.to(at::kDouble), right.to(at::kDouble));
    if (bias)
        require_shapes({{"bias", bias->sizes(), std::to_string(x2.size(1)) + " | 1 " + std::to_string(x2.size(1))}});
    out = bias ? y + *bias : y;
}

// Integer sums are exact, because they have less than 53 bits.
void quant_matmul(const AnyTensor& x1, const AnyTensor& x2, const OptionalTensor& token_scale, const AnyTensor& scale,
                  const OptionalAnyTensor& y_scale, const OptionalAnyTensor& x1_offset, const OptionalTensor& x2_offset,
                  const OptionalAnyTensor& y_offset, const OptionalAnyTensor& bias, bool transpose1, bool transpose2,
                  std::int64_t group_size, const Out& out) {
    const auto is_integer = [](const Tensor& x) { return at::isIntegralType(x.scalar_type(), false); };
    if (group_size == kMxGroups && !is_integer(x1) && !is_integer(x2)) {
        product_of_blocks(x1, x2, token_scale, scale, bias, transpose1, transpose2, out);
        return;
    }
    TORCH_CHECK(x1.scalar_type() != at::kInt && x2.scalar_type() != at::kInt,
                "the host NPU does not multiply matrices of int4, eight in each int32");
    TORCH_CHECK(x1.scalar_type() == at::kChar && x2.scalar_type() == at::kChar,
                "the host NPU multiplies int8 matrices only, not ", x1.scalar_type(), " and ", x2.scalar_type());
    TORCH_CHECK(scale.scalar_type() != at::kFloat8_e8m0fnu, "x2Scale has dtype float8_e8m0fnu, with which x1 and x2",
                " must be matrices of 8-bit or 4-bit floats");
    TORCH_CHECK(group_size == 0, "the host NPU has no groups of a quantized product, but got ", group_size);
    const bool has_offset = x2_offset && x2_offset->numel() > 0;
    TORCH_CHECK(!has_offset || out.dtype() == at::kChar, "x2Offset is that of an int8 result, but out has dtype ",
                name_of(out.dtype()));
    require_absent(y_scale, "y_scale");
    require_absent(x1_offset, "x1_offset");
    require_absent(y_offset, "y_offset");
    require_combination(token_scale.has_value(), scale.scalar_type(), bias, out.dtype());
    const Tensor left = x1.to(at::kDouble), right = x2.to(at::kDouble);
    auto y = at::matmul(transpose1 ? left.mT() : left, transpose2 ? right.mT() : right);
    // Scales and bias have a number per column or row; a scale may also be a single number.
    const auto rows = std::to_string(y.size(-2)), columns = std::to_string(y.size(-1));
    require_shapes({{"x2Scale", scale.sizes(), "1 | " + columns}});
    if (has_offset) require_shapes({{"x2Offset", x2_offset->sizes(), "1 | " + columns}});
    if (token_scale) require_shapes({{"x1Scale", token_scale->sizes(), "1 | " + rows}});
    if (bias) require_shapes({{"bias", bias->sizes(), columns + " | * 1 " + columns}});
    const auto is_whole = bias && !bias->is_floating_point();
    if (is_whole) y = y + *bias;
    if (out.dtype() != at::kInt) {
        y = y * scale_of(scale);
        if (token_scale) y = y * token_scale->unsqueeze(-1);
    }
    if (bias && !is_whole) y = y + *bias;
    // An int64 scale encodes its own offset, which CANN's kernel reads instead.
    if (out.dtype() == at::kChar) {
        const bool has_own_bits = scale.scalar_type() == at::kLong;
        y = saturated(y + (has_offset && !has_own_bits ? *x2_offset : offset_of(scale)), at::kChar);
    }
    out = y;
}
const TensorRules kQuantizedProduct{
    {"x1", Dtypes{ACL_INT8, ACL_INT32} | on_950(kBlockNumbers), "* * ..."},
    {"x2", Dtypes{ACL_INT8, ACL_INT32} | on_950(kBlockNumbers), "* * ..."},
    {"x1Scale", kFloat | on_950(kBlockScales), "* | * * 2"},
    {"x2Scale", Dtypes{ACL_FLOAT, ACL_BF16, ACL_INT64, ACL_UINT64} | on_950(kBlockScales), "* | * * 2"},
    {"yScale"},
    {"x1Offset"},
    {"x2Offset", {ACL_FLOAT, ACL_FLOAT16}},
    {"yOffset"},
    {"bias", kFloats | Dtypes{ACL_INT32}},
    {"out", kHalves | Dtypes{ACL_INT8, ACL_INT32} | on_950(kFloat)},
};
const Formula<"aclnnQuantMatmulV5", quant_matmul> quantized_product{kQuantizedProduct};
const Formula<"aclnnQuantMatmulWeightNz", quant_matmul> quantized_product_of_tiles{kQuantizedProduct};

// Dequantizes sums of integers and adds the bias.
void dequant_bias(const IntegerTensor& x, const Tensor& weight_scale, const OptionalTensor& token_scale,
                  const OptionalAnyTensor& bias, std::int64_t, const Out& out) {
    TORCH_CHECK(x.dim() == 2 && weight_scale.dim() == 1 && weight_scale.size(0) == x.size(1), "weight_scale of shape ",
                weight_scale.sizes(), " does not fit x of shape ", x.sizes());
    TORCH_CHECK(!token_scale || (token_scale->dim() == 1 && token_scale->size(0) == x.size(0)),
                "activation_scale does not fit x of shape ", x.sizes());
    const auto is_whole = bias && !bias->is_floating_point();
    Tensor y = x.to(at::kDouble);
    if (is_whole) y = y + *bias;
    y = y * weight_scale;
    if (token_scale) y = y * token_scale->unsqueeze(-1);
    out = bias && !is_whole ? y + *bias : y;
}
const Formula<"aclnnDequantBias", dequant_bias> dequantized_sums;

void quant_reduce_sum(const IntegerTensor& x1, const IntegerTensor& x2, const Tensor& x1_scale, const Tensor& x2_scale,
                      Without<"yScale">, Without<"x1Offset">, Without<"x2Offset">, Without<"yOffset">, Without<"bias">,
                      bool transpose_x1, bool transpose_x2, std::int64_t, const std::vector<std::int64_t>&,
                      bool keep_dims, const Out& out) {
    // torch_npu passes groupSize -1, and dims whose memory is freed by then.
    TORCH_CHECK(!transpose_x1 && !transpose_x2 && !keep_dims,
                "CANN takes neither transposeX1, transposeX2 nor keepDims");
    const auto products = at::matmul(x1.to(at::kDouble), x2.to(at::kDouble)).to(at::kFloat);
    out = (products * x1_scale.unsqueeze(-1) * x2_scale).sum(0);
}
const Formula<"aclnnQuantMatmulReduceSumWeightNz", quant_reduce_sum> sum_of_quantized_products{
    {"x1", {ACL_INT8}, "B M K"},  {"x2", {ACL_INT8}, "B K N"}, {"x1Scale", kFloat, "B M"},
    {"x2Scale", {ACL_BF16}, "N"}, {"out", {ACL_BF16}, "M N"},
};

}  // namespace
}  // namespace host_npu
