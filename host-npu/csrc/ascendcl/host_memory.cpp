#include "ascendcl/host_memory.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>

#include "ascendcl/acl_names.h"
#include "ascendcl/address_space.h"
#include "ascendcl/device.h"
#include "ascendcl/error.h"
#include "ascendcl/memory.h"

namespace host_npu {

HostMemory& HostMemory::instance() {
    static auto& memory = *new HostMemory;
    return memory;
}

void* HostMemory::allocate(std::size_t size) {
    require(size > 0, "size is 0");
    // Page-locked memory is limited to the host's memory; aligned_alloc alone would overcommit.
    const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
    void* const pointer =
        size / page_bytes() < pages ? std::aligned_alloc(page_bytes(), round_up(size, page_bytes())) : nullptr;
    if (pointer == nullptr) {
        throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION,
                    "the host has no " + std::to_string(size) + " bytes of page-locked memory");
    }
    const std::lock_guard lock(mutex_);
    ranges_.emplace(as_number(pointer), Range{size, true});
    count_alive("pinned host memory", 1);
    return pointer;
}

void HostMemory::release(void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(as_number(pointer));
    require(found != ranges_.end() && found->second.is_own, "hostPtr is not from aclrtMallocHost");
    ranges_.erase(found);
    count_alive("pinned host memory", -1);
    std::free(pointer);
}

void HostMemory::add(void* pointer, std::size_t size) {
    require(size <= UINTPTR_MAX - as_number(pointer), "size is more than any memory has");
    const std::lock_guard lock(mutex_);
    if (!ranges_.emplace(as_number(pointer), Range{size, false}).second) {
        throw Error(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "the host memory is registered already");
    }
}

void HostMemory::remove(void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(as_number(pointer));
    if (found == ranges_.end() || found->second.is_own) {
        throw Error(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "the host memory is not registered");
    }
    ranges_.erase(found);
}

bool HostMemory::contains(const void* pointer) const {
    const std::lock_guard lock(mutex_);
    auto range = ranges_.upper_bound(as_number(pointer));
    if (range == ranges_.begin()) return false;
    --range;
    return as_number(pointer) - range->first < range->second.size;
}

}  // namespace host_npu
