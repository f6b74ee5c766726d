// Gated units, GELU and RmsNorm, followed by a quantization of the rows.
#include "host_npu_formulas/halves.h"
#include "host_npu_formulas/norms.h"
#include "host_npu_formulas/quantization.h"

namespace host_npu {
namespace {

Tensor as_rows(const Tensor& x) { return x.dim() == 2 ? x : x.reshape({-1, x.size(-1)}); }

void quantize_rows(const Tensor& rows, const Out& y, const Out& scale) {
    require_int8(y);
    const auto [quantized, of_row] = quantized_rows(rows);
    y = quantized.view(y.sizes());
    scale = of_row.view(scale.sizes());
}

void require_dynamic(const std::string& mode, const char* what) {
    TORCH_CHECK(mode == "dynamic", "the host NPU quantizes ", what, " dynamically only, not by the quant mode ", mode);
}

// Expands a factor or offset per group, or per group and column, to rows.
Tensor of_groups(const char* name, const Tensor& numbers, const Tensor& rows, const OptionalIntegerTensor& groups,
                 bool sizes) {
    const auto columns = std::to_string(rows.size(1));
    require_shapes({{name, numbers.sizes(), "G | G " + columns}});
    return of_rows(numbers.dim() == 1 ? numbers.unsqueeze(1) : numbers, rows.size(0), groups, sizes);
}

// A static quantization takes offsets and does not write scales; a dynamic one ignores offsets. The scales are the
// factors of the rows, 127 / max |row|; other functions return the reciprocals.
void swiglu_quant(const Tensor& x, const OptionalTensor& smooth, const OptionalTensor& offsets,
                  const OptionalIntegerTensor& groups, bool activate_left, const std::string& mode,
                  std::int64_t list_type, std::int64_t, const Out& y, const Out& scale) {
    const bool is_static = mode == "static";
    TORCH_CHECK(is_static || mode == "dynamic", "the host NPU quantizes SwiGlu by the quant modes static and dynamic ",
                "only, not ", mode);
    TORCH_CHECK(!is_static || (smooth && offsets),
                "the host NPU quantizes SwiGlu by the quant mode static with smooth_scales and offsets only");
    TORCH_CHECK(!is_static || smooth->sizes() == offsets->sizes(), "offsets has shape ",
                offsets ? offsets->sizes() : at::IntArrayRef(), " instead of that of smooth_scales, ",
                smooth ? smooth->sizes() : at::IntArrayRef());
    const auto [left, right] = halves(as_rows(x), -1);
    auto rows = activate_left ? at::silu(left) * right : left * at::silu(right);
    if (smooth) rows = rows * of_groups("smooth_scales", *smooth, rows, groups, list_type == 1);
    require_int8(y);
    if (!is_static) {
        const auto [quantized, of_row] = quantized_rows(rows);
        y = quantized.view(y.sizes());
        scale = of_row.reciprocal().view(scale.sizes());
        return;
    }
    rows = rows + of_groups("offsets", *offsets, rows, groups, list_type == 1);
    y = saturated(rows, at::kChar).view(y.sizes());
}
const Formula<"aclnnSwiGluQuantV2", swiglu_quant> swiglu_to_int8;

// Dequantizes the int32 sums of an int8 product first.
void dequant_swiglu_quant(const AnyTensor& x, const OptionalTensor& weight_scale, const OptionalTensor& token_scale,
                          const OptionalAnyTensor& bias, const OptionalTensor& smooth, const OptionalTensor& offset,
                          const OptionalIntegerTensor& groups, bool activate_left, const std::string& mode,
                          std::int64_t, const std::string& rounding, std::int64_t dim, std::int64_t swiglu_mode,
                          double limit, double alpha, double glu_bias, const Out& y, const Out& scale) {
    require_dynamic(mode, "SwiGlu");
    TORCH_CHECK(!offset, "a dynamic quantization does not support an offset");
    TORCH_CHECK(rounding == "rint" && (dim == -1 || dim == x.dim() - 1),
                "the host NPU has round_mode rint and the last dimension only");
    TORCH_CHECK(swiglu_mode == 0 || swiglu_mode == 1, "swiglu_mode is ", swiglu_mode, " instead of 0 or 1");
    auto sums = as_rows(x).to(at::kDouble);
    const auto rows = sums.size(0);
    const bool whole = !x.is_floating_point();
    const auto columns = std::to_string(sums.size(1)), of_groups = columns + " | * " + columns;
    if (weight_scale) require_shapes({{"weightScale", weight_scale->sizes(), of_groups}});
    if (bias) require_shapes({{"bias", bias->sizes(), of_groups}});
    TORCH_CHECK(!token_scale || token_scale->numel() == rows, "activationScale has ",
                token_scale ? token_scale->numel() : 0, " elements instead of ", rows, ", one for each row of x");
    TORCH_CHECK(whole == weight_scale.has_value(), "weight_scale must be given for x of int32, and only for it");
    TORCH_CHECK(whole || (!token_scale && !bias), "activation_scale and bias are for x of int32 only");
    // A scalar per group, which CANN documents for some chips, is not supported: one value per column is required.
    const auto of_units = std::to_string(sums.size(1) / 2);
    if (smooth) {
        const auto shape = groups ? "* " + of_units : of_units + " | 1 " + of_units;
        require_shapes({{"quantScale", smooth->sizes(), shape}});
    }
    if (whole && bias && !bias->is_floating_point()) sums = sums + of_rows(*bias, rows, groups, true);
    if (weight_scale) sums = sums * of_rows(*weight_scale, rows, groups, true);
    if (token_scale) sums = sums * token_scale->reshape({-1, 1});
    if (bias && bias->is_floating_point()) sums = sums + of_rows(*bias, rows, groups, true);
    const auto wide = sums.to(at::kFloat);
    Tensor unit;
    if (swiglu_mode == 1) {
        const auto parts = wide.unflatten(-1, {-1, 2}).unbind(-1);
        const auto gate = parts[0].clamp_max(limit);
        unit = gate * at::sigmoid(gate * alpha) * (parts[1].clamp(-limit, limit) + glu_bias);
    } else {
        const auto [left, right] = halves(wide, -1);
        unit = activate_left ? at::silu(left) * right : left * at::silu(right);
    }
    if (smooth) unit = unit * of_rows(*smooth, rows, groups, true);
    quantize_rows(unit, y, scale);
}
const Formula<"aclnnDequantSwigluQuantV2", dequant_swiglu_quant> swiglu_of_sums_v2;

void dequant_swiglu_quant_v1(const AnyTensor& x, const OptionalTensor& weight_scale, const OptionalTensor& token_scale,
                             const OptionalAnyTensor& bias, const OptionalTensor& smooth, const OptionalTensor& offset,
                             const OptionalIntegerTensor& groups, bool activate_left, const std::string& mode,
                             const Out& y, const Out& scale) {
    dequant_swiglu_quant(x, weight_scale, token_scale, bias, smooth, offset, groups, activate_left, mode, 2, "rint", -1,
                         0, 0, 0, 0, y, scale);
}
const Formula<"aclnnDequantSwigluQuant", dequant_swiglu_quant_v1> swiglu_of_sums;

// A dynamic quantization ignores the offset.
void gelu_quant(const Tensor& x, const OptionalTensor& scale, const OptionalTensor& offset,
                const std::string& approximate, const std::string& mode, const std::string& rounding, std::int64_t,
                const Out& y, const OptionalOut& scale_out) {
    TORCH_CHECK(rounding == "rint", "the host NPU has round_mode rint only, not ", rounding);
    auto unit = at::gelu(x, approximate);
    if (mode == "dynamic") {
        TORCH_CHECK(scale_out, "a dynamic quantization needs an output for the scale of each row");
        quantize_rows(as_rows(scale ? unit * *scale : unit), y, *scale_out);
        return;
    }
    TORCH_CHECK(mode == "static" && scale, "quant_mode is ", mode, " instead of dynamic, or static with input_scale");
    require_int8(y);
    unit = unit * *scale;
    y = saturated(offset ? unit + *offset : unit, at::kChar);
}
const Formula<"aclnnGeluQuant", gelu_quant> gelu_to_int8;

void gelu_mul(const Tensor& x, const std::string& approximate, const Out& out) {
    const auto [left, right] = halves(x, -1);
    out = at::gelu(left, approximate.empty() ? "none" : approximate) * right;
}
const Formula<"aclnnGeluMul", gelu_mul> gelu_times_half;

void rms_norm_quant_v3(const Tensor& x, const Tensor& gamma, const Tensor& scale, const OptionalAnyTensor& offset,
                       const OptionalTensor& beta, double epsilon, bool divides, bool with_rstd, const Out& y,
                       const OptionalOut& rstd) {
    require_int8(y);
    const auto [result, of_row] = rms_normal(x, gamma, epsilon, beta);
    const auto scaled = divides ? result / scale : result * scale;
    y = saturated(offset ? scaled + widened(*offset) : scaled, at::kChar);
    if (with_rstd && rstd) *rstd = of_row.view(rstd->sizes());
}
const Formula<"aclnnRmsNormQuantV3", rms_norm_quant_v3> rms_norm_to_int8_v3;

// The sum is quantized once for each smooth scale, or once without one.
void add_rms_norm_dynamic_quant(const Tensor& x1, const Tensor& x2, const Tensor& gamma, const OptionalTensor& smooth1,
                                const OptionalTensor& smooth2, const OptionalTensor& beta, double epsilon,
                                const Bools& wanted, const OptionalOut& y1, const OptionalOut& y2, const Out& sum,
                                const OptionalOut& scale1, const OptionalOut& scale2) {
    TORCH_CHECK(!wanted.given || wanted.values.size() == 2, "output_mask has ", wanted.values.size(),
                " elements instead of 2");
    TORCH_CHECK(wanted.given || smooth1 || !smooth2, "smooth_scale2 without smooth_scale1 needs an output_mask");
    require_shapes({{"x1", x1.sizes(), "...x1"}, {"x2", x2.sizes(), "...x1"}});
    sum = x1 + x2;
    const auto result = rms_normal(x1 + x2, gamma, epsilon, beta).result;
    const auto is_wanted = [&](std::size_t index, bool otherwise) {
        return wanted.given ? wanted.values[index] != 0 : otherwise;
    };
    const auto rows = as_rows(result);
    if (is_wanted(0, true)) quantize_rows(smooth1 ? rows * *smooth1 : rows, *y1, *scale1);
    if (is_wanted(1, smooth2.has_value())) quantize_rows(smooth2 ? rows * *smooth2 : rows, *y2, *scale2);
}
const Formula<"aclnnAddRmsNormDynamicQuantV2", add_rms_norm_dynamic_quant> rms_norm_of_sum_to_int8;

}  // namespace
}  // namespace host_npu
