// Which processes live: a number alone may be another process's by now.
#pragma once

#include <cstdint>

namespace host_npu::hccl {

struct Process {
    std::int32_t id;
    std::int32_t unused;
    // In the kernel's ticks since the machine started.
    std::uint64_t started;
};

Process this_process();

// False once the process has ended, also if nobody has asked for its exit status yet.
bool is_alive(const Process& process);

}  // namespace host_npu::hccl
