// A private copy of device memory, in which captured work is rehearsed: a capture leaves device memory as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace host_npu {

// Copies ranges of device memory when they are first asked for, and then keeps its own values. Thread-safe.
class ShadowMemory {
  public:
    // For the device addresses from `base` on.
    ShadowMemory(std::uintptr_t base, std::size_t bytes);
    ~ShadowMemory();
    ShadowMemory(const ShadowMemory&) = delete;
    ShadowMemory& operator=(const ShadowMemory&) = delete;

    // Copies the range that begins at the device address `start`, unless it has the range of this serial number.
    void include(std::uintptr_t start, std::size_t bytes, std::uint64_t serial, const void* contents);
    // Where the copy of a device address is.
    void* address_of(std::uintptr_t device_address) const;

    // The copy that stands for device memory in the calling thread; null for the memory itself.
    static ShadowMemory* of_thread();

    // For its lifetime the copy stands for device memory in the calling thread.
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
    // The serial number of the range that was copied, by its first device address.
    std::map<std::uintptr_t, std::uint64_t> copied_;
};

}  // namespace host_npu
