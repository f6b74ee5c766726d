// Environment variables that configure the simulated machine; each is read once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ascendcl/device.h"

namespace host_npu {

// HOST_NPU_DEVICES: the number of devices; 1 by default.
std::int32_t device_count();

// HOST_NPU_MEMORY: the memory of each device in MiB; by default an equal share of the host's.
std::size_t device_memory_bytes();

// Whether HOST_NPU_MEMORY is set. Otherwise allocations also fail when the host is out of memory.
bool memory_is_set();

// HOST_NPU_STRICT_MEMORY: 1 to disable padding of allocations.
bool strict_memory();

// The model name of the chip soc(), as returned by aclrtGetSocName.
const std::string& soc_name();

struct CoreCounts {
    std::uint32_t cube;
    std::uint32_t vector;
};

CoreCounts core_counts();

}  // namespace host_npu
