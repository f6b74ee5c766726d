// The most common call of linear_cross_entropy with few logits, which mostly costs the checks of its arguments.
#pragma once

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>

#include <optional>

#include "../autograd/python_entry.h"
#include "dispatch.h"

namespace torch_aclnn_ops {

struct FewLogits {
    static constexpr auto name = "few_logits";

    static at::Tensor call(const at::Tensor& input, const at::Tensor& linear_weight,
                           const std::optional<at::Tensor>& linear_bias, const at::Tensor& target, int64_t reduction,
                           int64_t ignore_index, double label_smoothing, int64_t /*most_logits*/) {
        return at::cross_entropy_loss(at::linear(input, linear_weight, linear_bias), target, {}, reduction,
                                      ignore_index, label_smoothing);
    }
};

// Calls whose loss torch's functions compute directly: float32 rows that all have a class, outside of modes, transforms
// and autocast. The head is not the result of an operator, as a part of a sharded head would be.
struct FewLogitsCalls {
    static bool include(const at::Tensor& input, const at::Tensor& linear_weight,
                        const std::optional<at::Tensor>& linear_bias, const at::Tensor& target, int64_t /*reduction*/,
                        int64_t ignore_index, double label_smoothing, int64_t most_logits) {
        return reaches_cpu({}, input, linear_weight, linear_bias, target) && is_float32(input, 2) &&
               is_float32(linear_weight, 2) && input.size(1) == linear_weight.size(1) && linear_weight.is_leaf() &&
               is_bias(linear_bias, linear_weight.size(0)) && label_smoothing >= 0 && label_smoothing <= 1 &&
               input.size(0) * linear_weight.size(0) <= most_logits && target.dim() == 1 &&
               target.size(0) == input.size(0) && have_classes(target, linear_weight.size(0), ignore_index);
    }

  private:
    static bool is_float32(const at::Tensor& tensor, int64_t dimensions) {
        return tensor.scalar_type() == at::kFloat && tensor.dim() == dimensions;
    }

    static bool is_bias(const std::optional<at::Tensor>& bias, int64_t classes) {
        return !bias.has_value() || (is_float32(*bias, 1) && bias->size(0) == classes);
    }

    static bool have_classes(const at::Tensor& target, int64_t classes, int64_t ignore_index) {
        if (target.scalar_type() != at::kLong || target.is_inference() || target.size(0) == 0) {
            return false;
        }
        const int64_t* const first = target.const_data_ptr<int64_t>();
        for (int64_t row = 0; row < target.size(0); ++row) {
            const int64_t index = first[row * target.stride(0)];
            if (index < 0 || index >= classes || index == ignore_index) {
                return false;
            }
        }
        return true;
    }
};

}  // namespace torch_aclnn_ops
