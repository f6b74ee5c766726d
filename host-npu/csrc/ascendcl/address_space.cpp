#include "ascendcl/address_space.h"

#include <iterator>

namespace host_npu {

std::optional<std::uintptr_t> AddressSpace::take(std::size_t size, std::size_t alignment) {
    for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
        const auto [start, length] = *gap;
        const auto before = (alignment - start % alignment) % alignment;
        const auto aligned = start + before;
        if (length < before || length - before < size) continue;
        const auto after = length - before - size;
        free_.erase(gap);
        if (before > 0) free_.emplace(start, before);
        if (after > 0) free_.emplace(aligned + size, after);
        return aligned;
    }
    return std::nullopt;
}

void AddressSpace::give_back(std::uintptr_t start, std::size_t size) {
    auto gap = free_.emplace(start, size).first;
    if (const auto next = std::next(gap); next != free_.end() && gap->first + gap->second == next->first) {
        gap->second += next->second;
        free_.erase(next);
    }
    if (gap != free_.begin()) {
        if (const auto previous = std::prev(gap); previous->first + previous->second == gap->first) {
            previous->second += gap->second;
            free_.erase(gap);
        }
    }
}

}  // namespace host_npu
