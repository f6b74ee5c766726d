// Identifies processes across reuse of their IDs.
#pragma once

#include <cstdint>

namespace host_npu::hccl {

struct Process {
    std::int32_t id;
    std::int32_t unused;
    // In clock ticks since boot.
    std::uint64_t started;
};

Process this_process();

// False once the process has ended, also if it is a zombie.
bool is_alive(const Process& process);

}  // namespace host_npu::hccl
