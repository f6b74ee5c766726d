// Page-locked host memory, which the device can reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace host_npu {

// Knows which host memory was allocated or registered for the device. Thread-safe; throws Error.
class HostMemory {
  public:
    static HostMemory& instance();

    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;

    void* allocate(std::size_t size);
    void release(void* pointer);
    // Memory that is the caller's; registering it changes only what contains() says.
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
