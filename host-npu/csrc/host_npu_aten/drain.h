// Waiting for the device.
#pragma once

#include <c10/core/Device.h>

namespace host_npu {

// Waits until torch_npu has launched what it queued for the current stream, and the stream has done it.
void drain(c10::Device device);

}  // namespace host_npu
