// Quantization to 8 bits and back. A scale multiplies or divides a number before it is rounded.
#include "host_npu_formulas/quantization.h"

#include <vector>

#include "host_npu_formulas/norms.h"
#include "opapi/native_kernels.h"

namespace host_npu {

Tensor saturated(const Tensor& x, at::ScalarType dtype) {
    const auto whole = x.round().nan_to_num(0);
    if (dtype == at::kChar) return whole.clamp(-128, 127).to(dtype);
    if (dtype == at::kByte) return whole.clamp(0, 255).to(dtype);
    TORCH_CHECK(dtype == at::kInt, "the host NPU quantizes to int8, uint8 and int32 only");
    return whole.to(at::kDouble).clamp(-2147483648.0, 2147483647.0).to(dtype);
}

void require_int8(const Out& out) {
    TORCH_CHECK(out.dtype() != at::kInt, "the host NPU does not quantize to int4, eight in each int32");
    TORCH_CHECK(out.dtype() == at::kChar, "the host NPU quantizes to int8 only here, not ", out.dtype());
}

std::pair<Tensor, Tensor> quantized_rows(const Tensor& x) {
    const auto scale = x.abs().amax(-1) / 127;
    return {saturated(x / scale.unsqueeze(-1), at::kChar), scale};
}

Tensor of_rows(const Tensor& numbers, std::int64_t rows, const OptionalIntegerTensor& groups, bool sizes) {
    if (numbers.dim() < 2 || numbers.size(0) == 1) return numbers;
    TORCH_CHECK(groups && groups->dim() == 1 && groups->size(0) == numbers.size(0), "scales of shape ", numbers.sizes(),
                " must have one row per group");
    const auto wide = groups->to(at::kLong);
    const auto ends = sizes ? wide.cumsum(0) : Tensor(wide);
    const auto group = at::searchsorted(ends, at::arange(rows, ends.options()), false, /*right=*/true);
    return numbers.index({group.clamp_max(numbers.size(0) - 1)});
}

namespace {

// Multiplies x by its smooth scales; with groups, each group has a row of scales and ends before a row of x.
Tensor smoothed(const Tensor& x, const OptionalTensor& smooth, const OptionalIntegerTensor& groups) {
    const auto columns = std::to_string(x.size(-1));
    if (!groups) {
        if (smooth) require_shapes({{"smooth_scales", smooth->sizes(), columns}});
        return smooth ? x * *smooth : x;
    }
    TORCH_CHECK(smooth, "a group_index needs smooth_scales");
    require_shapes({{"smooth_scales", smooth->sizes(), "E " + columns}, {"group_index", groups->sizes(), "E"}});
    TORCH_CHECK(groups->size(0) > 0 && groups->size(0) <= 1024, "group_index has ", groups->size(0),
                " elements; CANN takes 1 to 1024 groups");
    const auto rows = x.reshape({-1, x.size(-1)});
    return (rows * of_rows(*smooth, rows.size(0), groups, false)).view(x.sizes());
}

void dynamic(const Tensor& x, const OptionalTensor& smooth, const OptionalIntegerTensor& groups,
             const std::string& mode, const Out& y, const Out& scale_out, const OptionalOut& offset_out) {
    TORCH_CHECK(mode == "pertoken" || mode == "pertensor",
                "the host NPU has the quant modes pertoken and pertensor only, not ", mode);
    require_int8(y);
    auto rows = smoothed(x, smooth, groups);
    if (mode == "pertensor") rows = rows.flatten();
    const auto largest = rows.amax(-1, true);
    auto scale = rows.abs().amax(-1, true) / 127;
    auto quantized = rows / scale;
    if (offset_out) {
        scale = (largest - rows.amin(-1, true)) / 255;
        const auto offset = 127 - largest / scale;
        quantized = rows / scale + offset;
        *offset_out = offset.reshape(offset_out->sizes());
    }
    scale_out = scale.reshape(scale_out.sizes());
    y = saturated(quantized, at::kChar).reshape(x.sizes());
}

void dynamic_quant(const Tensor& x, const OptionalTensor& smooth, const OptionalIntegerTensor& groups, std::int64_t,
                   const Out& y, const Out& scale, const OptionalOut& offset) {
    dynamic(x, smooth, groups, "pertoken", y, scale, offset);
}
const TensorRules kDynamicQuant{
    {"x", kHalves, "* * ..."},
    {"smoothScalesOptional", as("x"), "* | * *"},
    {"groupIndexOptional", {ACL_INT32}, "*"},
    {"yOut", {ACL_INT8, ACL_INT32}},
    {"scaleOut", kFloat},
    {"offsetOut", kFloat},
};
const Formula<"aclnnDynamicQuantV2", dynamic_quant> dynamic_by_token{kDynamicQuant};

void dynamic_quant_by(const Tensor& x, const OptionalTensor& smooth, const OptionalIntegerTensor& groups, std::int64_t,
                      bool symmetric, const std::string& mode, float largest, const Out& y, const Out& scale,
                      const OptionalOut& offset) {
    TORCH_CHECK(largest == 0, "the host NPU has no dst_type_max, but got ", largest);
    TORCH_CHECK(symmetric != offset.has_value(),
                "offset must be given if the quantization is not symmetric, and only then");
    dynamic(x, smooth, groups, mode, y, scale, offset);
}
const Formula<"aclnnDynamicQuantV4", dynamic_quant_by> dynamic_by_mode{kDynamicQuant};

// Quantizes each row in blocks of 128 columns with a scale each.
void dynamic_block_quant_v2(const Tensor& x, double least, const std::string& rounding, std::int64_t type,
                            std::int64_t rows, std::int64_t columns, double largest, const Out& y, const Out& scale) {
    // CANN's documents give an upper bound of a scale, the inverse of minScale.
    TORCH_CHECK(least == 0, "the host NPU has minScale 0 only, not ", least);
    TORCH_CHECK(rounding == "rint", "roundMode is ", rounding, " instead of rint");
    TORCH_CHECK(type == ACL_INT8, "the host NPU quantizes blocks to int8 only, not to aclDataType ", type);
    TORCH_CHECK(rows == 1 && columns == 128, "the host NPU has blocks of 1 row and 128 columns only, not ", rows,
                " and ", columns);
    TORCH_CHECK(largest == 0, "the host NPU has no dst_type_max, but got ", largest);
    const auto blocks = (x.size(-1) + 127) / 128;
    const auto parts = at::constant_pad_nd(x, {0, blocks * 128 - x.size(-1)}).unflatten(-1, {blocks, 128});
    const auto [quantized, of_block] = quantized_rows(parts);
    y = quantized.flatten(-2).slice(-1, 0, x.size(-1));
    scale = of_block;
}
const TensorRules kBlocks{
    {"x", kFloats, "M N | B M N"}, {"yOut", {ACL_INT8}, "M N | B M N"}, {"scaleOut", kFloat, "* * | B * *"}};
const Formula<"aclnnDynamicBlockQuantV2", dynamic_block_quant_v2> blocks_to_int8_v2{kBlocks};

void dynamic_block_quant(const Tensor& x, double least, const std::string& rounding, std::int64_t type,
                         std::int64_t rows, std::int64_t columns, const Out& y, const Out& scale) {
    dynamic_block_quant_v2(x, least, rounding, type, rows, columns, 0, y, scale);
}
const Formula<"aclnnDynamicBlockQuant", dynamic_block_quant> blocks_to_int8{kBlocks};

// Broadcasts `scale` along a dimension of x. A single number needs no such dimension.
Tensor along(const Tensor& scale, const Tensor& x, std::int64_t axis) {
    if (scale.numel() == 1) return scale.reshape({});
    const auto dim = c10::maybe_wrap_dim(axis, x.dim());
    if (scale.dim() != 1) return scale;
    TORCH_CHECK(scale.size(0) == x.size(dim), "scale has ", scale.size(0), " elements instead of ", x.size(dim));
    std::vector<std::int64_t> shape(x.dim(), 1);
    shape[dim] = -1;
    return scale.reshape(shape);
}

void ascend_quant(const Tensor& x, const Tensor& scale, const OptionalTensor& offset, bool square,
                  const std::string& rounding, std::int32_t, std::int32_t axis, const Out& y) {
    TORCH_CHECK(!square, "the host NPU does not square a scale");
    TORCH_CHECK(rounding == "round", "the host NPU has the rounding round only, not ", rounding);
    require_int8(y);
    auto scaled = x * along(scale, x, axis);
    if (offset) scaled = scaled + along(*offset, x, axis);
    y = saturated(scaled, at::kChar);
}
const Formula<"aclnnAscendQuantV3", ascend_quant> ascend_quant_by_axis;

// Each group has a row of the scale, and ends before a row of x.
void group_quant(const Tensor& x, const Tensor& scale, const IntegerTensor& ends, const OptionalTensor& offset,
                 std::int32_t, const Out& y) {
    TORCH_CHECK(x.dim() == 2 && scale.dim() == 2 && scale.size(1) == x.size(1) && ends.dim() == 1 &&
                    ends.size(0) == scale.size(0),
                "x of shape ", x.sizes(), ", scale of shape ", scale.sizes(), " and group_index of shape ",
                ends.sizes(), " do not fit");
    TORCH_CHECK(!offset || offset->numel() == 1, "the offset of groups must have one element");
    require_int8(y);
    const auto group = at::searchsorted(ends, at::arange(x.size(0), ends.options()), false, /*right=*/true);
    const auto scaled = x * scale.index_select(0, group);
    y = saturated(offset ? scaled + offset->flatten() : scaled, at::kChar);
}
const Formula<"aclnnGroupQuant", group_quant> quantize_by_group{
    {"x", kFloats, "S H"},         {"scale", kFloats, "E H"},
    {"groupIndex", kIndices, "E"}, {"offsetOptional", as("scale"), "1 |"},
    {"y", {ACL_INT8}, "S H"},
};

void quantize(const Tensor& x, const Tensor& scale, const OptionalAnyTensor& zero_points, std::int32_t,
              std::int32_t axis, const Out& out) {
    auto scaled = x / along(scale, x, axis);
    if (zero_points) scaled = scaled + along(widened(*zero_points), x, axis);
    out = saturated(scaled, out.dtype());
}
const Formula<"aclnnQuantize", quantize> quantize_by_axis;
// torch_npu's kernels of these call it; their results differ between its versions.
const NativeKernels native{"aten::quantize_per_tensor", "aten::quantize_per_channel"};

void ascend_anti_quant(const IntegerTensor& x, const Tensor& scale, const OptionalTensor& offset, std::int64_t,
                       bool square, const Out& y) {
    TORCH_CHECK(x.scalar_type() == at::kChar, "the host NPU dequantizes int8 only, not ", x.scalar_type());
    TORCH_CHECK(!square, "the host NPU does not square a scale");
    const auto shifted = offset ? widened(x) + *offset : widened(x);
    y = shifted * scale;
}
const Formula<"aclnnAscendAntiQuant", ascend_anti_quant> anti_quant;

void rms_norm_quant(const Tensor& x, const Tensor& gamma, const OptionalTensor& beta, const Tensor& scale,
                    const OptionalAnyTensor& offset, double epsilon, const Out& y) {
    TORCH_CHECK(gamma.dim() <= 2 && gamma.size(-1) == x.size(-1) && gamma.numel() == x.size(-1), "gamma of shape ",
                gamma.sizes(), " does not fit x of shape ", x.sizes());
    TORCH_CHECK(!beta || beta->numel() == gamma.numel(), "beta of shape ", beta ? beta->sizes() : at::IntArrayRef(),
                " does not fit gamma of shape ", gamma.sizes());
    TORCH_CHECK(scale.numel() == 1 && (!offset || offset->numel() == 1), "scale and offset must have one element");
    require_int8(y);
    auto normal = rms_normal(x, gamma.flatten(), epsilon).result;
    if (beta) normal = normal + beta->flatten();
    normal = normal / scale.flatten();
    y = saturated(offset ? normal + widened(*offset).flatten() : normal, at::kChar);
}
const Formula<"aclnnRmsNormQuant", rms_norm_quant> rms_norm_to_int8;

void add_rms_norm_quant(const Tensor& x1, const Tensor& x2, const Tensor& gamma, const Tensor& scale,
                        const OptionalTensor& second_scale, const OptionalAnyTensor& zero_points,
                        const OptionalAnyTensor& second_zero_points, const OptionalTensor& beta, std::int64_t axis,
                        double epsilon, bool divides, const Out& y, const OptionalOut&, const Out& sum,
                        const OptionalOut& normal_out) {
    TORCH_CHECK(!second_scale && !second_zero_points, "the host NPU has one quantization of AddRmsNorm only");
    TORCH_CHECK(!normal_out || normal_out->sizes() != x1.sizes(), "the host NPU does not return the normalized sum");
    TORCH_CHECK(axis == -1, "the host NPU quantizes along axis -1 only, not ", axis);
    require_int8(y);
    require_shapes({{"x1", x1.sizes(), "...x1"}, {"x2", x2.sizes(), "...x1"}});
    const auto x = x1 + x2;
    sum = x;
    const auto normal = rms_normal(x, gamma, epsilon, beta).result;
    const auto scaled = divides ? normal / scale : normal * scale;
    y = saturated(zero_points ? scaled + widened(*zero_points) : scaled, at::kChar);
}
const Formula<"aclnnAddRmsNormQuantV2", add_rms_norm_quant> add_rms_norm_to_int8;

}  // namespace
}  // namespace host_npu
