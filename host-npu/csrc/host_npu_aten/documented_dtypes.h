// Refusal of dtypes that CANN does not document for the operators behind PyTorch's.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>

#include <string_view>

namespace host_npu {

// Raises the device's error if CANN does not support the dtype of the operator's first tensor.
void refuse_undocumented_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
// The same for an operator with its own kernel here.
void refuse_undocumented_dtype(std::string_view name, at::ScalarType dtype);

}  // namespace host_npu
