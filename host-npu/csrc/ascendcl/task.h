// The tasks of streams.
#pragma once

#include <functional>
#include <string>

namespace host_npu {

// How a capture treats a task: it runs the task on a copy of device memory and records it, or only records it.
enum class Captured { rehearsed, recorded };

struct Task {
    std::string name;
    std::function<void()> work;
    // Always runs, because other threads wait for it; an earlier fault does not cancel it.
    bool is_signal = false;
    Captured captured = Captured::rehearsed;
    // The name of the launched operator, for counting.
    const char* launch = nullptr;
};

}  // namespace host_npu
