#pragma once

#include <ATen/ops/mse_loss.h>

#include "loss_function.h"

namespace torch_aclnn_ops {

// The squared error; Backward::call() is its gradient.
template <class Function, class Backward>
struct MseLoss : LossFunction<Function> {
    static constexpr auto name = "mse_loss";
    static constexpr bool is_function_of_difference = true;
    using Weight = std::optional<at::Tensor>;

    static at::Tensor call(const at::Tensor& input, const at::Tensor& target, int64_t reduction) {
        return Function::apply(input, target, Weight(), reduction);
    }
    static at::Tensor loss(const at::Tensor& input, const at::Tensor& target, const Weight&, int64_t reduction) {
        return at::mse_loss(input, target, reduction);
    }
    static at::Tensor grad_input(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& target,
                                 const Weight&, int64_t reduction) {
        return Backward::call(grad_output, input, target, reduction);
    }
};

}  // namespace torch_aclnn_ops
