#include "ascendcl/host_limits.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ascendcl/acl_names.h"
#include "ascendcl/error.h"
#include "ascendcl/settings.h"

namespace host_npu {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kMostKeptFree = std::size_t{1} << 30;
constexpr std::size_t kPartKeptFree = 16;
constexpr std::size_t kBytesBetweenChecks = std::size_t{64} << 20;
// Uninitialized memory has no usable values, as on a device: NaN in floating types, -1 in integer types.
constexpr int kFreshByte = 0xFF;

// The folder that has /proc and /sys; another one in tests.
std::string& root() {
    static auto& folder = *new std::string;
    return folder;
}

std::optional<std::size_t> number(const std::string& text) {
    std::size_t value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc()) return std::nullopt;
    return value;
}

// The first word of a file; nothing if it is not a number, such as "max".
std::optional<std::size_t> number_in(const std::string& path) {
    std::ifstream file(path);
    std::string word;
    if (!(file >> word)) return std::nullopt;
    return number(word);
}

// The numbers of some lines "name number", added up; nothing if no line has one of the names.
std::optional<std::size_t> numbers_of(const std::string& path, const std::vector<std::string>& names) {
    std::ifstream file(path);
    std::optional<std::size_t> sum;
    for (std::string line; std::getline(file, line);) {
        const auto end = line.find(' ');
        if (end == std::string::npos || std::find(names.begin(), names.end(), line.substr(0, end)) == names.end()) {
            continue;
        }
        const auto digits = line.find_first_not_of(' ', end);
        if (digits == std::string::npos) continue;
        if (const auto value = number(line.substr(digits))) sum = sum.value_or(0) + *value;
    }
    return sum;
}

std::optional<std::size_t> of_machine(const std::string& name) {
    const auto kibibytes = numbers_of(root() + "/proc/meminfo", {name});
    if (!kibibytes) return std::nullopt;
    return *kibibytes << 10;
}

// The files of one version of control groups.
struct Version {
    std::string folder;
    std::string limit;
    std::string usage;
    // Lines of memory.stat: cached files, which the kernel drops when memory is short.
    std::vector<std::string> cached;
};

const Version& version(int number) {
    static const auto& first = *new Version{"/sys/fs/cgroup/memory",
                                            "memory.limit_in_bytes",
                                            "memory.usage_in_bytes",
                                            {"total_active_file", "total_inactive_file"}};
    static const auto& second =
        *new Version{"/sys/fs/cgroup", "memory.max", "memory.current", {"active_file", "inactive_file"}};
    return number == 1 ? first : second;
}

struct Group {
    const Version* version;
    std::string folder;
    std::size_t limit;

    std::size_t available() const {
        const auto used = number_in(folder + "/" + version->usage).value_or(0);
        const auto cached = numbers_of(folder + "/memory.stat", version->cached).value_or(0);
        const auto needed = used - std::min(used, cached);
        return limit - std::min(limit, needed);
    }
};

// Of the process's group and of those that it is in, the ones with a limit. In a container the path may be that of the
// machine, whose groups are not there, but the container's own is always the outermost.
void add_groups(std::vector<Group>& groups, const Version& version, std::string path, std::size_t machine) {
    for (;;) {
        while (!path.empty() && path.back() == '/') path.pop_back();
        const auto folder = root() + version.folder + path;
        const auto limit = number_in(folder + "/" + version.limit);
        if (limit && *limit < machine) groups.push_back({&version, folder, *limit});
        if (path.empty()) return;
        path.erase(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
    }
}

bool has_memory(std::string_view controllers) {
    return ("," + std::string(controllers) + ",").find(",memory,") != std::string::npos;
}

struct Host {
    std::size_t bytes;
    std::size_t kept_free;
    std::vector<Group> groups;
};

const Host& host() {
    static const auto& found = *new Host([] {
        const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
        Host host{of_machine("MemTotal:").value_or(pages), 0, {}};
        std::ifstream file(root() + "/proc/self/cgroup");
        // hierarchy:controllers:path, where version 2 lists no controllers
        for (std::string line; std::getline(file, line);) {
            const auto first = line.find(':');
            const auto second = first == std::string::npos ? first : line.find(':', first + 1);
            if (second == std::string::npos) continue;
            const auto controllers = line.substr(first + 1, second - first - 1);
            if (!controllers.empty() && !has_memory(controllers)) continue;
            add_groups(host.groups, version(controllers.empty() ? 2 : 1), line.substr(second + 1), host.bytes);
        }
        for (const auto& group : host.groups) host.bytes = std::min(host.bytes, group.limit);
        host.kept_free = std::min(kMostKeptFree, host.bytes / kPartKeptFree);
        return host;
    }());
    return found;
}

}  // namespace

std::size_t host_memory_bytes() { return host().bytes; }

std::size_t available_bytes() {
    auto available = of_machine("MemAvailable:").value_or(kUnlimited);
    for (const auto& group : host().groups) available = std::min(available, group.available());
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
    auto* const bytes = static_cast<std::uint8_t*>(start);
    for (std::size_t done = 0; done < size;) {
        const auto part = std::min(kBytesBetweenChecks, size - done);
        if (done > 0) require_available(part);
        std::memset(bytes + done, kFreshByte, part);
        done += part;
    }
}

}  // namespace host_npu

// For tests, before the first call of the runtime: a folder with other /proc and /sys.
extern "C" HOST_NPU_EXPORT void host_npu_read_limits_from(const char* folder) { host_npu::root() = folder; }
