// Device memory: addresses that fault when the host touches them, and an alias of each for kernels and copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>

#include "ascendcl/address_space.h"

namespace host_npu {

// What protections and mappings are multiples of: 4 KiB on x86-64, 4, 16 or 64 KiB on aarch64.
std::size_t page_bytes();

// Rounded up; throws if that is beyond 64 bits, as no memory is.
std::size_t round_up(std::size_t size, std::size_t to);

// Physical memory without an address, which aclrtMapMem gives one.
class PhysicalMemory {
  public:
    PhysicalMemory(std::int32_t device, std::size_t size);
    ~PhysicalMemory();
    PhysicalMemory(const PhysicalMemory&) = delete;
    PhysicalMemory& operator=(const PhysicalMemory&) = delete;

    std::int32_t device() const { return device_; }
    std::size_t size() const { return size_; }
    int file() const { return file_; }

  private:
    std::int32_t device_;
    std::size_t size_;
    int file_;
};

// The device memory of all devices of the process. All functions are thread-safe and throw Error.
class DeviceMemory {
  public:
    static DeviceMemory& instance();

    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    // `padding` bytes more than `size`, rounded up to 32, can be used, unless memory is strict.
    void* allocate(std::int32_t device, std::size_t size, std::size_t padding);
    void release(void* pointer);

    void* reserve(std::size_t size, std::size_t alignment);
    void unreserve(void* pointer);
    void map(void* pointer, std::size_t size, std::size_t offset, std::shared_ptr<const PhysicalMemory> memory);
    void unmap(void* pointer);

    // Whether the address is the devices', live or not.
    bool contains(const void* pointer) const;

    // Returns the alias of `pointer`, whose next `size` bytes are live; throws std::out_of_range if they are not.
    void* alias(const void* pointer, std::size_t size = 0) const;

    // The device that the live memory at `pointer` belongs to.
    std::optional<std::int32_t> device_of(const void* pointer) const;

  private:
    struct Live {
        std::size_t size;
        // The bytes that can be used.
        std::size_t usable;
        // With the guard page behind it.
        std::size_t taken;
        std::int32_t device;
        // Null if it was allocated and not mapped.
        std::shared_ptr<const PhysicalMemory> memory;
    };
    using LiveRanges = std::map<std::uintptr_t, Live>;

    DeviceMemory();

    void* alias_of(std::uintptr_t address) const;
    std::uintptr_t take(std::size_t size, std::size_t alignment);
    LiveRanges::const_iterator find(std::uintptr_t address) const;

    std::uintptr_t base_;
    std::ptrdiff_t alias_offset_;
    mutable std::shared_mutex mutex_;
    AddressSpace addresses_;
    LiveRanges live_;
    std::map<std::uintptr_t, std::size_t> reserved_;
};

}  // namespace host_npu
