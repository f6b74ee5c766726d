// What the environment says about the simulated machine; each value is read once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ascendcl/device.h"

namespace host_npu {

// HOST_NPU_DEVICES: the number of devices, 1 if it is not set.
std::int32_t device_count();

// HOST_NPU_MEMORY: the memory of each device in MiB; if it is not set, the devices share the host's.
std::size_t device_memory_bytes();

// HOST_NPU_STRICT_MEMORY: 1 if allocations are to end where they were asked to end.
bool strict_memory();

// A model of the chip that soc() names, as aclrtGetSocName spells it.
const std::string& soc_name();

struct CoreCounts {
    std::uint32_t cube;
    std::uint32_t vector;
};

CoreCounts core_counts();

}  // namespace host_npu
