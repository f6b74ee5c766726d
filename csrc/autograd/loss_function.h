// The C++ autograd function of a loss: for small tensors, one in Python costs as much as the rest of the call.
//
// It computes what torch_aclnn_ops/functional/_loss_function.py does, without forward-mode AD.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace torch_aclnn_ops {

inline std::optional<at::Tensor> given(const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// A Loss derives from this. It has a name, loss(), grad_input() and, unless it is a function of input - target,
// grad_target(), whose last arguments are input, target, weight and reduction. It is a struct, not a template instance,
// because torch demangles its name in every backward pass.
template <class Loss>
struct LossFunction : torch::autograd::Function<Loss> {
    // Whether the target's gradient is the negated input's gradient.
    static constexpr bool is_function_of_difference = false;

    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                              const at::Tensor& target, const std::optional<at::Tensor>& weight, int64_t reduction) {
        const at::AutoDispatchBelowADInplaceOrView below;
        // The caller has already applied autocast, which raises for some losses.
        const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
        context->save_for_backward({input, target, weight.value_or(at::Tensor())});
        context->saved_data["reduction"] = reduction;
        return Loss::loss(input, target, weight, reduction);
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& grad_outputs) {
        const torch::autograd::variable_list saved = context->get_saved_variables();
        const at::Tensor &input = saved[0], &target = saved[1], &grad_output = grad_outputs[0];
        const std::optional<at::Tensor> weight = given(saved[2]);
        const int64_t reduction = context->saved_data["reduction"].toInt();
        const bool needs_input = context->needs_input_grad(0), needs_target = context->needs_input_grad(1);
        at::Tensor grad_input, grad_target;
        if (needs_input || (needs_target && Loss::is_function_of_difference)) {
            grad_input = Loss::grad_input(grad_output, input, target, weight, reduction);
        }
        if (needs_target) {
            if constexpr (Loss::is_function_of_difference) {
                grad_target = grad_input.neg();
            } else {
                grad_target = Loss::grad_target(grad_output, input, target, weight, reduction);
            }
        }
        return {needs_input ? grad_input : at::Tensor(), grad_target, at::Tensor(), at::Tensor()};
    }
};

}  // namespace torch_aclnn_ops
