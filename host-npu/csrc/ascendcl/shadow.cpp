#include "ascendcl/shadow.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "acl/acl_base.h"
#include "ascendcl/error.h"
#include "ascendcl/host_limits.h"

namespace host_npu {
namespace {

thread_local ShadowMemory* shadow_of_thread = nullptr;

std::uintptr_t reserve(std::size_t bytes) {
    void* const start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION,
                    "the host has no addresses for the capture's copy of device memory");
    }
    madvise(start, bytes, MADV_DONTDUMP);
    return reinterpret_cast<std::uintptr_t>(start);
}

}  // namespace

ShadowMemory::ShadowMemory(std::uintptr_t base, std::size_t bytes)
    : base_(base), bytes_(bytes), copies_(reserve(bytes)) {}

ShadowMemory::~ShadowMemory() { munmap(reinterpret_cast<void*>(copies_), bytes_); }

void* ShadowMemory::address_of(std::uintptr_t device_address) const {
    return reinterpret_cast<void*>(copies_ + (device_address - base_));
}

void ShadowMemory::include(std::uintptr_t start, std::size_t bytes, std::uint64_t serial, const void* contents) {
    const std::lock_guard lock(mutex_);
    auto& known = copied_[start];
    if (known == serial) return;
    require_available(bytes);
    void* const copy = address_of(start);
    if (mprotect(copy, bytes, PROT_READ | PROT_WRITE) != 0) {
        throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no memory for the capture's copy of device memory");
    }
    std::memcpy(copy, contents, bytes);
    known = serial;
}

ShadowMemory* ShadowMemory::of_thread() { return shadow_of_thread; }

ShadowMemory::Use::Use(ShadowMemory& shadow) : before_(std::exchange(shadow_of_thread, &shadow)) {}

ShadowMemory::Use::~Use() { shadow_of_thread = before_; }

}  // namespace host_npu
