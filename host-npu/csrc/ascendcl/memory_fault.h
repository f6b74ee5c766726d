// Explains crashes caused by invalid accesses to device memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace host_npu {

// Explains faults in the `size` bytes from `device` and from `alias` on stderr, before the previous handler runs.
void explain_memory_faults(std::uintptr_t device, std::uintptr_t alias, std::size_t size);

}  // namespace host_npu
