#include "ascendcl/host_limits.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "ascendcl/acl_names.h"
#include "ascendcl/error.h"
#include "ascendcl/settings.h"

namespace host_npu {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kMostKeptFree = std::size_t{1} << 30;
constexpr std::size_t kPartKeptFree = 16;
// Fresh memory holds no usable values, as on a device: NaN in floating types, -1 in integer types.
constexpr int kFreshByte = 0xFF;

// The directory that contains /proc and /sys; replaced by tests.
std::string& root() {
    static auto& folder = *new std::string;
    return folder;
}

// The number at the beginning of a file; nullopt if there is none, as in "max".
std::optional<std::size_t> number_in(const std::string& path) {
    std::ifstream file(root() + path);
    std::size_t value = 0;
    return file >> value ? std::optional(value) : std::nullopt;
}

// The number in the line "name number".
std::optional<std::size_t> number_of(const std::string& path, const std::string& name) {
    std::ifstream file(root() + path);
    std::string word;
    for (std::size_t value = 0; file >> word; file.ignore(kUnlimited >> 1, '\n')) {
        if (word == name && file >> value) return value;
    }
    return std::nullopt;
}

std::optional<std::size_t> of_machine(const std::string& name) {
    const auto kibibytes = number_of("/proc/meminfo", name);
    return kibibytes ? std::optional(*kibibytes << 10) : std::nullopt;
}

// The unused part of a container's limit. Cached files count as unused: the kernel drops them when memory is short.
std::size_t left_of(std::size_t limit) {
    constexpr const char* kStatistics = "/sys/fs/cgroup/memory.stat";
    const auto used = number_in("/sys/fs/cgroup/memory.current").value_or(0);
    const auto cached =
        number_of(kStatistics, "active_file").value_or(0) + number_of(kStatistics, "inactive_file").value_or(0);
    const auto needed = used - std::min(used, cached);
    return limit - std::min(limit, needed);
}

struct Host {
    std::size_t bytes;
    std::size_t kept_free;
    // The container's limit.
    std::optional<std::size_t> limit;
};

const Host& host() {
    static const auto& found = *new Host([] {
        const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
        Host host{of_machine("MemTotal:").value_or(pages), 0, number_in("/sys/fs/cgroup/memory.max")};
        host.bytes = std::min(host.bytes, host.limit.value_or(kUnlimited));
        host.kept_free = std::min(kMostKeptFree, host.bytes / kPartKeptFree);
        return host;
    }());
    return found;
}

}  // namespace

std::size_t host_memory_bytes() { return host().bytes; }

std::size_t available_bytes() {
    auto available = of_machine("MemAvailable:").value_or(kUnlimited);
    if (host().limit) available = std::min(available, left_of(*host().limit));
    if (available == kUnlimited) return available;
    return available - std::min(available, host().kept_free);
}

void require_available(std::size_t size) {
    if (memory_is_set()) return;
    const auto available = available_bytes();
    if (size <= available) return;
    throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION,
                "the host is out of memory: " + std::to_string(size) + " bytes were asked for, " +
                    std::to_string(available) + " are available, and " + std::to_string(host().kept_free) +
                    " more are kept free; HOST_NPU_MEMORY sets the memory of a device without this check");
}

void fill_new_memory(void* start, std::size_t size) {
    require_available(size);
    std::memset(start, kFreshByte, size);
}

}  // namespace host_npu

// For tests: reads /proc and /sys from another directory. Must precede the first call of the runtime.
extern "C" HOST_NPU_EXPORT void host_npu_read_limits_from(const char* folder) { host_npu::root() = folder; }
