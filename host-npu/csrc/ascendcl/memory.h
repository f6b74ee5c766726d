// Device memory: addresses that fault on host access, each with an alias for kernels and copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>

#include "ascendcl/address_space.h"
#include "ascendcl/shadow.h"

namespace host_npu {

// The granularity of protection and mapping: 4 KiB on x86-64; 4, 16 or 64 KiB on aarch64.
std::size_t page_bytes();

// Rounds up to a multiple of `to`; throws on 64-bit overflow.
std::size_t round_up(std::size_t size, std::size_t to);

// Physical memory, which aclrtMapMem maps to an address.
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

    // The usable bytes are `size` rounded up to 32 plus `padding`, or `size` if memory is strict.
    void* allocate(std::int32_t device, std::size_t size, std::size_t padding);
    void release(void* pointer);

    void* reserve(std::size_t size, std::size_t alignment);
    void unreserve(void* pointer);
    void map(void* pointer, std::size_t size, std::size_t offset, std::shared_ptr<const PhysicalMemory> memory);
    void unmap(void* pointer);

    // Whether the address is a device address, allocated or not.
    bool contains(const void* pointer) const;

    // Returns the alias of `pointer`; throws std::out_of_range unless the next `size` bytes are live. On a thread that
    // rehearses captured work, returns an address in the capture's copy.
    void* alias(const void* pointer, std::size_t size = 0) const;

    // Returns an empty copy of device memory.
    std::unique_ptr<ShadowMemory> shadow() const;

    // The device that owns the live memory at `pointer`.
    std::optional<std::int32_t> device_of(const void* pointer) const;

  private:
    struct Live {
        std::size_t size;
        // The usable bytes.
        std::size_t usable;
        // Including the guard page.
        std::size_t taken;
        std::int32_t device;
        // Unique to this range.
        std::uint64_t serial;
        // Null if nothing is mapped.
        std::shared_ptr<const PhysicalMemory> memory;
    };
    using LiveRanges = std::map<std::uintptr_t, Live>;

    DeviceMemory();

    void* alias_of(std::uintptr_t address) const;
    std::uintptr_t take(std::size_t size, std::size_t alignment);
    LiveRanges::const_iterator find(std::uintptr_t address) const;
    void* in_shadow(ShadowMemory& shadow, std::uintptr_t address, LiveRanges::const_iterator first,
                    LiveRanges::const_iterator last) const;

    std::uintptr_t base_;
    std::ptrdiff_t alias_offset_;
    mutable std::shared_mutex mutex_;
    AddressSpace addresses_;
    LiveRanges live_;
    std::uint64_t next_serial_ = 1;
    std::map<std::uintptr_t, std::size_t> reserved_;
};

}  // namespace host_npu
