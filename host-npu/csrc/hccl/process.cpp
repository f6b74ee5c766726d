#include "hccl/process.h"

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>

namespace host_npu::hccl {
namespace {

struct Status {
    char state;
    std::uint64_t started;
};

std::optional<Status> status_of(std::int32_t id) {
    // Reads the main thread's file, which has the same start time: qemu user emulation fakes /proc/ID/stat.
    std::ifstream file("/proc/" + std::to_string(id) + "/task/" + std::to_string(id) + "/stat");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    // The second field is the name, in parentheses, and may contain anything.
    const auto end_of_name = text.rfind(')');
    if (end_of_name == std::string::npos) return std::nullopt;
    std::istringstream fields(text.substr(end_of_name + 1));
    Status status{};
    fields >> status.state;
    constexpr int kFieldsUntilStart = 18;
    std::string skipped;
    for (int field = 0; field < kFieldsUntilStart; ++field) fields >> skipped;
    fields >> status.started;
    if (!fields) return std::nullopt;
    return status;
}

}  // namespace

Process this_process() {
    const auto id = getpid();
    const auto status = status_of(id);
    return {id, 0, status ? status->started : 0};
}

bool is_alive(const Process& process) {
    const auto status = status_of(process.id);
    return status && status->started == process.started && status->state != 'Z' && status->state != 'X';
}

}  // namespace host_npu::hccl
