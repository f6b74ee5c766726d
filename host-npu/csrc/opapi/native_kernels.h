// The kernels of torch_npu that run on simulated operators.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "ascendcl/device.h"

namespace host_npu {

// The aten operators whose torch_npu kernels call a simulated operator. libhost_npu_aten keeps these kernels and lets
// the CPU compute the other operators.
HOST_NPU_EXPORT const std::vector<std::string>& native_kernels();

// Registers aten operators. Each source has one such object if torch_npu has kernels that call its functions:
//
//     const NativeKernels native{"aten::mse_loss", "aten::mse_loss_backward"};
class HOST_NPU_EXPORT NativeKernels {
  public:
    NativeKernels(std::initializer_list<const char*> aten_operators);
};

}  // namespace host_npu
