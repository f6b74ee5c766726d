// How much memory the host has: the machine, or the container (control group of version 2) that the process runs in.
#pragma once

#include <cstddef>

namespace host_npu {

// The memory of the machine, or of the container if that has less; constant.
std::size_t host_memory_bytes();

// What can be allocated now. A sixteenth of the host's memory, at most 1 GiB, is kept free for everything else.
std::size_t available_bytes();

// Throws if so much cannot be allocated now, because the kernel would end a process when the memory is used. Does
// nothing if HOST_NPU_MEMORY is set.
void require_available(std::size_t size);

// Fills new memory, which makes the kernel provide it, and throws as require_available does.
void fill_new_memory(void* start, std::size_t size);

}  // namespace host_npu
