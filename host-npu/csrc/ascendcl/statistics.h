// Counters for tests, and injected failures.
#pragma once

#include <cstddef>
#include <cstdint>

namespace host_npu {

// Adds `delta` to the number of bytes allocated on a device.
void count_device_bytes(std::int32_t device, std::int64_t delta);

std::size_t device_bytes(std::int32_t device);

// The peak of device_bytes() since the last reset.
std::size_t peak_device_bytes(std::int32_t device);

}  // namespace host_npu
