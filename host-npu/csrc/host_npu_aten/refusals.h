// Refusal of calls for which torch_npu's memory kernels return wrong results without an error, also on a device.
#pragma once

#include <torch/library.h>

namespace host_npu {

// Registers the refusals. `kernels` are the NPU's.
void register_refusals(torch::Library& kernels);

}  // namespace host_npu
