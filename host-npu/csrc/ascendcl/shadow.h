// A private copy of device memory in which captured work is rehearsed, so that a capture does not change device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace host_npu {

// Copies a range of device memory at its first use, and keeps its own values from then on. Thread-safe.
class ShadowMemory {
  public:
    // Covers `bytes` device addresses from `base`.
    ShadowMemory(std::uintptr_t base, std::size_t bytes);
    ~ShadowMemory();
    ShadowMemory(const ShadowMemory&) = delete;
    ShadowMemory& operator=(const ShadowMemory&) = delete;

    // Copies the range at the device address `start`, unless the range with this serial number has been copied.
    void include(std::uintptr_t start, std::size_t bytes, std::uint64_t serial, const void* contents);
    // The address of the copy of a device address.
    void* address_of(std::uintptr_t device_address) const;

    // The copy that replaces device memory on the calling thread, or null.
    static ShadowMemory* of_thread();

    // Replaces device memory with the copy on the calling thread, for the lifetime of this object.
    class Use {
      public:
        explicit Use(ShadowMemory& shadow);
        ~Use();
        Use(const Use&) = delete;
        Use& operator=(const Use&) = delete;

      private:
        ShadowMemory* const before_;
    };

  private:
    const std::uintptr_t base_;
    const std::size_t bytes_;
    const std::uintptr_t copies_;
    std::mutex mutex_;
    // The serial number of each copied range, by its first device address.
    std::map<std::uintptr_t, std::uint64_t> copied_;
};

}  // namespace host_npu
