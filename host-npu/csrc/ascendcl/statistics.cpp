#include "ascendcl/statistics.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "ascendcl/device.h"
#include "ascendcl/error.h"

namespace host_npu {
namespace {

struct Failure {
    std::string function;
    std::int64_t calls_before;
    std::int32_t status;
    std::string message;
};

struct Bytes {
    std::int64_t now = 0;
    std::int64_t peak = 0;
};

struct Statistics {
    std::mutex mutex;
    std::map<std::string, std::int64_t> alive;
    std::map<std::string, std::int64_t> launches;
    std::map<std::string, std::int64_t> collectives;
    std::map<std::string, std::int64_t> collective_bytes;
    std::map<std::int32_t, Bytes> bytes;
    // The number of calls of each function that can fail, while calls are counted.
    std::map<std::string, std::int64_t> calls;
    bool counts_calls = false;
    std::vector<Failure> failures;
    // False while no test injects failures or counts calls, so that calls skip the lock.
    std::atomic<bool> looks_at_calls{false};

    void set_whether_it_looks() { looks_at_calls = counts_calls || !failures.empty(); }
};

// Never destroyed, because worker threads count until the process ends.
Statistics& statistics() {
    static auto& all = *new Statistics;
    return all;
}

template <typename Key, typename Value, typename Write>
void write_object(std::ostream& out, const std::map<Key, Value>& entries, Write write) {
    out << '{';
    const char* separator = "";
    for (const auto& [key, value] : entries) {
        out << std::exchange(separator, ", ") << '"' << key << "\": ";
        write(value);
    }
    out << '}';
}

Bytes bytes_of(std::int32_t device) {
    auto& all = statistics();
    const std::lock_guard lock(all.mutex);
    const auto found = all.bytes.find(device);
    return found == all.bytes.end() ? Bytes{} : found->second;
}

std::string as_json() {
    auto& all = statistics();
    const std::lock_guard lock(all.mutex);
    std::ostringstream out;
    const auto number = [&](std::int64_t value) { out << value; };
    out << "{\"alive\": ";
    write_object(out, all.alive, number);
    out << ", \"launches\": ";
    write_object(out, all.launches, number);
    out << ", \"collectives\": ";
    write_object(out, all.collectives, number);
    out << ", \"collective_bytes\": ";
    write_object(out, all.collective_bytes, number);
    out << ", \"calls\": ";
    write_object(out, all.calls, number);
    out << ", \"device_bytes\": ";
    write_object(out, all.bytes, [&](const Bytes& bytes) { out << bytes.now; });
    out << ", \"peak_device_bytes\": ";
    write_object(out, all.bytes, [&](const Bytes& bytes) { out << bytes.peak; });
    std::map<std::string, std::int64_t> pending;
    for (const auto& failure : all.failures) ++pending[failure.function];
    out << ", \"pending_failures\": ";
    write_object(out, pending, number);
    out << '}';
    return out.str();
}

}  // namespace

void count_launch(const char* api) {
    auto& all = statistics();
    const std::lock_guard lock(all.mutex);
    ++all.launches[api];
}

void count_collective(const char* function, std::int64_t bytes) {
    auto& all = statistics();
    const std::lock_guard lock(all.mutex);
    ++all.collectives[function];
    all.collective_bytes[function] += bytes;
}

void count_alive(const char* kind, int delta) {
    auto& all = statistics();
    const std::lock_guard lock(all.mutex);
    all.alive[kind] += delta;
}

void count_device_bytes(std::int32_t device, std::int64_t delta) {
    auto& all = statistics();
    const std::lock_guard lock(all.mutex);
    auto& bytes = all.bytes[device];
    bytes.now += delta;
    bytes.peak = std::max(bytes.peak, bytes.now);
}

std::size_t device_bytes(std::int32_t device) { return static_cast<std::size_t>(bytes_of(device).now); }

std::size_t peak_device_bytes(std::int32_t device) { return static_cast<std::size_t>(bytes_of(device).peak); }

std::optional<std::pair<std::int32_t, std::string>> injected_failure(const char* function) {
    auto& all = statistics();
    if (!all.looks_at_calls.load(std::memory_order_relaxed)) return std::nullopt;
    const std::lock_guard lock(all.mutex);
    if (all.counts_calls) ++all.calls[function];
    std::optional<std::pair<std::int32_t, std::string>> due;
    std::erase_if(all.failures, [&](Failure& failure) {
        if (failure.function != function || failure.calls_before-- > 0) return false;
        due.emplace(failure.status, failure.message);
        return true;
    });
    all.set_whether_it_looks();
    return due;
}

}  // namespace host_npu

extern "C" {

HOST_NPU_EXPORT const char* host_npu_stats_json() {
    thread_local std::string json;
    json = host_npu::as_json();
    return json.c_str();
}

HOST_NPU_EXPORT void host_npu_reset() {
    host_npu::forget_errors();
    auto& all = host_npu::statistics();
    const std::lock_guard lock(all.mutex);
    all.launches.clear();
    all.collectives.clear();
    all.collective_bytes.clear();
    all.calls.clear();
    all.counts_calls = false;
    all.failures.clear();
    all.set_whether_it_looks();
    for (auto& [device, bytes] : all.bytes) bytes.peak = bytes.now;
}

// Returns false if a failure of this call has already been injected.
HOST_NPU_EXPORT bool host_npu_fail(const char* function, std::int64_t nth, std::int32_t status, const char* message) {
    auto& all = host_npu::statistics();
    const std::lock_guard lock(all.mutex);
    const auto is_same = [&](const auto& other) { return other.function == function && other.calls_before == nth - 1; };
    if (std::ranges::any_of(all.failures, is_same)) return false;
    all.failures.push_back({function, nth - 1, status, message});
    all.set_whether_it_looks();
    return true;
}

HOST_NPU_EXPORT void host_npu_count_calls() {
    auto& all = host_npu::statistics();
    const std::lock_guard lock(all.mutex);
    all.counts_calls = true;
    all.set_whether_it_looks();
}

}  // extern "C"
