// What a device refuses: dtypes that CANN's documents of the operators behind PyTorch's do not list.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace host_npu {

// Raises the error of the device if CANN does not take the dtype of the operator's first tensor.
void refuse_undocumented_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace host_npu
