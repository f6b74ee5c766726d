// What streams run.
#pragma once

#include <functional>
#include <string>

namespace host_npu {

// What a capture does with a task: runs it in a copy of device memory and records it, or records it only.
enum class Captured { rehearsed, recorded };

struct Task {
    std::string name;
    std::function<void()> work;
    // Always runs, because other threads wait for it; an earlier fault does not cancel it.
    bool is_signal = false;
    Captured captured = Captured::rehearsed;
    // The operator that is launched, which is counted.
    const char* launch = nullptr;
};

}  // namespace host_npu
