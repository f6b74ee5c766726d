#include "host_npu_aten/drain.h"

#include <torch_npu/csrc/core/npu/NPUException.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

namespace host_npu {

void drain(c10::Device device) {
    // torch.npu.set_sync_debug_mode() would report torch_npu's own wait, but on a device the host does not wait here.
    const auto status = aclrtSynchronizeStream(c10_npu::getCurrentNPUStream(device.index()).stream());
    TORCH_CHECK(status == ACL_ERROR_NONE, "NPU function error: aclrtSynchronizeStream, error code is ", status, "\n",
                c10_npu::c10_npu_get_error_message());
}

}  // namespace host_npu
