// Identification of processes that is safe against reuse of their IDs.
#pragma once

#include <cstdint>

namespace host_npu::hccl {

struct Process {
    std::int32_t id;
    std::int32_t unused;
    // The start time in clock ticks since boot.
    std::uint64_t started;
};

Process this_process();

// Whether the process still runs; false for a zombie.
bool is_alive(const Process& process);

}  // namespace host_npu::hccl
