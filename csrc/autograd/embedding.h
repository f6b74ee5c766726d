#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/embedding.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

namespace torch_aclnn_ops {

// The autograd function of an embedding for eager calls. Backward::call() is the gradient, which does not depend on the
// weight.
template <class Function, class Backward>
struct Embedding : torch::autograd::Function<Function> {
    static constexpr auto name = "embedding";

    static at::Tensor call(const at::Tensor& input, const at::Tensor& weight, int64_t padding_idx,
                           bool scale_grad_by_freq) {
        return Function::apply(input, weight, padding_idx, scale_grad_by_freq);
    }
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                              const at::Tensor& weight, int64_t padding_idx, bool scale_grad_by_freq) {
        // The result would otherwise be a view, and autograd forbids in-place changes of a Function's views.
        const at::AutoDispatchBelowADInplaceOrView below;
        context->save_for_backward({input});
        context->saved_data["options"] = std::tuple(weight.size(0), padding_idx, scale_grad_by_freq);
        return at::embedding(weight, input, padding_idx, scale_grad_by_freq);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& grad_outputs) {
        const auto [num_weights, padding_idx, scale_grad_by_freq] =
            context->saved_data["options"].to<std::tuple<int64_t, int64_t, bool>>();
        const at::Tensor input = context->get_saved_variables()[0];
        return {at::Tensor(), Backward::call(grad_outputs[0], input, num_weights, padding_idx, scale_grad_by_freq),
                at::Tensor(), at::Tensor()};
    }
};

}  // namespace torch_aclnn_ops
