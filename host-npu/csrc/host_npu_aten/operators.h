// Which aten operators the CPU computes on device memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace host_npu {

// Throws if torch_npu lacks a kernel that a simulated operator names as its own; to be called before kernels are
// replaced.
void require_native_kernels();

// Whether the CPU's kernel stands in for the operator's NPU kernel.
bool falls_back(const c10::OperatorHandle& op);

// Whether the operators that PyTorch composes the operator of stand in for torch_npu's kernels of it.
bool is_composed(const c10::OperatorHandle& op);

// Whether PyTorch's own derivatives stand in for the operator's autograd kernel, which may call what is not simulated.
bool is_derived_by_pytorch(const c10::OperatorHandle& op);

// Whether the operator's argument may be a tensor of the host next to those of a device.
bool may_be_on_host(const c10::OperatorHandle& op, const c10::Argument& argument);

}  // namespace host_npu
