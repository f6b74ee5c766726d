// Page-locked host memory, which the device can access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace host_npu {

// The host memory allocated or registered for the device. Thread-safe; throws Error.
class HostMemory {
  public:
    static HostMemory& instance();

    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;

    void* allocate(std::size_t size);
    void release(void* pointer);
    // Registers the caller's memory, which only affects contains().
    void add(void* pointer, std::size_t size);
    void remove(void* pointer);
    bool contains(const void* pointer) const;

  private:
    struct Range {
        std::size_t size;
        bool is_own;
    };

    HostMemory() = default;

    mutable std::mutex mutex_;
    std::map<std::uintptr_t, Range> ranges_;
};

}  // namespace host_npu
