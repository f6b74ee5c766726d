// Attention of NPU tensors by the CPU's operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace host_npu {

// aten::scaled_dot_product_attention with the choice among implementations that PyTorch makes for the CPU.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double> scale,
                     bool enable_gqa);

}  // namespace host_npu
