// A raw operator as registered with PyTorch's dispatcher, and whether its derivatives are needed.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

namespace torch_aclnn_ops {

// Without `requires_grad`, a tensor may still carry a tangent of forward-mode AD.
inline bool needs_derivative(const at::Tensor& tensor, bool grad_mode) {
    return tensor.defined() && ((grad_mode && tensor.requires_grad()) || tensor._fw_grad(0).defined());
}
inline bool needs_derivative(const std::optional<at::Tensor>& tensor, bool grad_mode) {
    return tensor.has_value() && needs_derivative(*tensor, grad_mode);
}
template <class Number>
bool needs_derivative(const Number&, bool) {
    return false;
}

template <class Operator, class Function>
struct RawOperator;

// An Operator has the name of the raw operator, and a function run() with its arguments and result.
template <class Operator, class Result, class... Parameters>
struct RawOperator<Operator, Result (*)(Parameters...)> {
    static Result call(Parameters... arguments) { return handle().call(arguments...); }

    static const auto& handle() {
        static const auto found =
            c10::Dispatcher::singleton()
                .findSchemaOrThrow((std::string("torch_aclnn_ops::") + Operator::name).c_str(), "")
                .template typed<Result(Parameters...)>();
        return found;
    }
};

}  // namespace torch_aclnn_ops
