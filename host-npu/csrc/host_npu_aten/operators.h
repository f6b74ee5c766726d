// The selection of kernels for aten operators.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace host_npu {

// Throws if torch_npu lacks a kernel that the simulated operators declare as native. Call it before any is replaced.
void require_native_kernels();

// Whether the CPU kernel replaces the operator's NPU kernel.
bool falls_back(const c10::OperatorHandle& op);

// Whether PyTorch's composite replaces torch_npu's kernels of the operator.
bool is_composed(const c10::OperatorHandle& op);

// Whether PyTorch's derivative replaces the operator's autograd kernel, which may call unsupported operators.
bool is_derived_by_pytorch(const c10::OperatorHandle& op);

// Whether the argument may be a CPU tensor next to NPU tensors.
bool may_be_on_host(const c10::OperatorHandle& op, const c10::Argument& argument);

}  // namespace host_npu
