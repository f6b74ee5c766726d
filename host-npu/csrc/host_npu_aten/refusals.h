// What torch_npu's kernels of memory compute wrongly without an error, on a device, too.
#pragma once

#include <torch/library.h>

namespace host_npu {

// Has such calls refused. `kernels` are those of the NPU.
void register_refusals(torch::Library& kernels);

}  // namespace host_npu
