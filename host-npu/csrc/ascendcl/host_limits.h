// The memory of the host: of the machine, or of the process's container (cgroup v2).
#pragma once

#include <cstddef>

namespace host_npu {

// The memory of the machine, or the container's limit if that is less; constant.
std::size_t host_memory_bytes();

// The memory that can be allocated now. A sixteenth of the host's memory, at most 1 GiB, stays free.
std::size_t available_bytes();

// Throws if `size` bytes are not available, because the kernel would kill a process when the memory is used. Does
// nothing if HOST_NPU_MEMORY is set.
void require_available(std::size_t size);

// Fills new memory, so that the kernel provides it. Throws like require_available.
void fill_new_memory(void* start, std::size_t size);

}  // namespace host_npu
