// What a device refuses: dtypes that CANN's documents of the operators behind PyTorch's do not list.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>

#include <string_view>

namespace host_npu {

// Raises the error of the device if CANN does not take the dtype of the operator's first tensor.
void refuse_undocumented_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
// The same for an operator that has a kernel of its own here.
void refuse_undocumented_dtype(std::string_view name, at::ScalarType dtype);

}  // namespace host_npu
