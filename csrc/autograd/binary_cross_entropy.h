#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/ops/binary_cross_entropy.h>

#include "loss_function.h"

namespace torch_aclnn_ops {

// The binary cross entropy; Backward::call() is its gradient.
template <class Function, class Backward>
struct BinaryCrossEntropy : LossFunction<Function> {
    static constexpr auto name = "binary_cross_entropy";
    using Weight = std::optional<at::Tensor>;

    static at::Tensor call(const at::Tensor& input, const at::Tensor& target, const Weight& weight, int64_t reduction) {
        return Function::apply(input, target, weight, reduction);
    }
    static at::Tensor loss(const at::Tensor& input, const at::Tensor& target, const Weight& weight, int64_t reduction) {
        return at::binary_cross_entropy(input, target, weight, reduction);
    }
    static at::Tensor grad_input(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& target,
                                 const Weight& weight, int64_t reduction) {
        return Backward::call(grad_output, input, target, weight, reduction);
    }
    // The loss is linear in the target: d/dy of -(y log x + (1 - y) log(1 - x)) is log(1 - x) - log x.
    static at::Tensor grad_target(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor&,
                                  const Weight& weight, int64_t reduction) {
        const at::Tensor probability = at::isReducedFloatingType(input.scalar_type()) ? input.to(at::kFloat) : input;
        at::Tensor gradient = probability.neg().log1p().sub(probability.log()).mul(grad_output);
        gradient = weight.has_value() ? gradient.mul(*weight) : gradient;
        gradient = reduction == at::Reduction::Mean ? gradient.div(input.numel()) : gradient;
        return gradient.to(input.scalar_type());
    }
};

}  // namespace torch_aclnn_ops
