// An allocator of address ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

namespace host_npu {

inline std::uintptr_t as_number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// Allocates parts of [0, size) first-fit, and merges free parts. Not thread-safe.
class AddressSpace {
  public:
    explicit AddressSpace(std::size_t size) { free_.emplace(0, size); }

    // Returns the start of `size` free bytes at a multiple of `alignment`, or nullopt if there are none.
    std::optional<std::uintptr_t> take(std::size_t size, std::size_t alignment);

    void give_back(std::uintptr_t start, std::size_t size);

  private:
    std::map<std::uintptr_t, std::size_t> free_;
};

}  // namespace host_npu
