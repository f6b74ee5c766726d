// Which kernels of torch_npu run on the simulated operators.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "ascendcl/device.h"

namespace host_npu {

// The aten operators whose kernels in torch_npu call a simulated operator. The library of aten operators leaves these
// kernels in place, and lets the CPU compute the others.
HOST_NPU_EXPORT const std::vector<std::string>& native_kernels();

// Adds aten operators to these. A file of operators has one such object if torch_npu has
// kernels that call its functions:
//
//     const NativeKernels native{"aten::mse_loss", "aten::mse_loss_backward"};
class HOST_NPU_EXPORT NativeKernels {
  public:
    NativeKernels(std::initializer_list<const char*> aten_operators);
};

}  // namespace host_npu
