// Synchronization with the device.
#pragma once

#include <c10/core/Device.h>

namespace host_npu {

// Waits until torch_npu has launched the queued calls of the current stream and the stream has completed them.
void drain(c10::Device device);

}  // namespace host_npu
