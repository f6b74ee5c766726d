// Which aten operators the CPU computes on device memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace host_npu {

// Whether the CPU's kernel stands in for the operator's NPU kernel.
bool falls_back(const c10::OperatorHandle& op);

// Whether PyTorch's composite of other operators stands in for the operator's autograd kernel.
bool is_composed(const c10::OperatorHandle& op);

// Whether the operator may get tensors of the host next to those of a device.
bool takes_host_tensors(const c10::OperatorHandle& op);

}  // namespace host_npu
