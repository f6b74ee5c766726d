#include "host_npu_aten/attention.h"

#include <ATen/SDPBackend.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "host_npu_aten/products.h"

namespace host_npu {
namespace {

// The fused operator takes a mask of what to add to the scores only.
std::optional<at::Tensor> as_summand(const std::optional<at::Tensor>& mask, c10::ScalarType dtype) {
    if (!mask || !mask->defined() || mask->scalar_type() != at::kBool) return mask;
    const auto zeros = at::zeros(mask->sizes(), mask->options().dtype(dtype));
    return zeros.masked_fill(mask->logical_not(), -std::numeric_limits<double>::infinity());
}

// The fused operator has no derivative by the mask, such as a learned bias.
bool is_learned(const std::optional<at::Tensor>& mask) {
    return at::GradMode::is_enabled() && mask && mask->defined() && mask->requires_grad();
}

bool have_16_bits(std::initializer_list<at::Tensor> tensors) { return std::ranges::all_of(tensors, has_16_bits); }

std::optional<at::Tensor> wide_mask(const std::optional<at::Tensor>& mask) {
    const bool is_narrow = mask && mask->defined() && has_16_bits(*mask);
    return is_narrow ? mask->to(at::kFloat) : mask;
}

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double> scale,
                     bool enable_gqa) {
    if (have_16_bits({query, key, value})) {
        // With these conversions' derivatives the backward is computed in float32 too, and rounded once.
        const auto result = attention(query.to(at::kFloat), key.to(at::kFloat), value.to(at::kFloat), wide_mask(mask),
                                      dropout, is_causal, scale, enable_gqa);
        return result.to(query.scalar_type());
    }
    const auto choice = at::_fused_sdp_choice(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
    if (choice == static_cast<int64_t>(at::SDPBackend::flash_attention) && !is_learned(mask)) {
        const auto summand = as_summand(mask, query.scalar_type());
        return std::get<0>(
            at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, summand, scale));
    }
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal, std::nullopt,
                                                              scale, enable_gqa));
}

}  // namespace host_npu
