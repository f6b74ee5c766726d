#include "ascendcl/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>

#include "ascendcl/address_space.h"
#include "ascendcl/error.h"
#include "ascendcl/host_limits.h"
#include "ascendcl/memory_fault.h"
#include "ascendcl/settings.h"
#include "ascendcl/statistics.h"

namespace host_npu {
namespace {

// The maximum lets every device reserve its memory many times over, as expandable segments do. The minimum is for
// limited address space (valgrind, ulimit).
constexpr std::size_t kMostAddressBytes = std::size_t{8} << 40;
constexpr std::size_t kLeastAddressBytes = std::size_t{1} << 30;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::string hexadecimal(std::uintptr_t address) {
    std::ostringstream text;
    text << "0x" << std::hex << address;
    return text.str();
}

[[noreturn]] void throw_system_error(const char* call) {
    throw Error(ACL_ERROR_RT_DRV_INTERNAL_ERROR, std::string(call) + " failed: " + std::strerror(errno));
}

void* map_addresses(std::size_t size) {
    return mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// The largest size that can be reserved three times: for device addresses, host aliases and the copy of a capture.
std::size_t address_bytes() {
    static const std::size_t bytes = [] {
        for (auto size = kMostAddressBytes; size > kLeastAddressBytes; size /= 8) {
            void* const start = map_addresses(3 * size);
            if (start != MAP_FAILED) {
                munmap(start, 3 * size);
                return size;
            }
        }
        return kLeastAddressBytes;
    }();
    return bytes;
}

void* reserve_addresses() {
    void* const start = map_addresses(address_bytes());
    if (start == MAP_FAILED) throw_system_error("mmap of the device addresses");
    madvise(start, address_bytes(), MADV_DONTDUMP);
    return start;
}

// Throws the error of a call that failed because the host is out of memory.
[[noreturn]] void throw_no_memory(const char* call) {
    if (errno != ENOMEM && errno != ENOSPC) throw_system_error(call);
    throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION,
                "the host is out of memory: " + std::string(call) + " failed: " + std::strerror(errno));
}

void make_unusable(void* alias, std::size_t size) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(alias, size, PROT_NONE, flags, -1, 0) == MAP_FAILED) throw_system_error("mmap");
}

void charge(std::int32_t device, std::size_t size) {
    const auto used = device_bytes(device);
    if (used > device_memory_bytes() || size > device_memory_bytes() - used) {
        throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION,
                    "device " + std::to_string(device) + " is out of memory: " + std::to_string(size) +
                        " bytes were asked for, " +
                        std::to_string(device_memory_bytes() - std::min(used, device_memory_bytes())) + " of " +
                        std::to_string(device_memory_bytes()) + " are free");
    }
    count_device_bytes(device, static_cast<std::int64_t>(size));
}

void discharge(std::int32_t device, std::size_t size) { count_device_bytes(device, -static_cast<std::int64_t>(size)); }

void fill_file(int file, std::size_t size) {
    void* const start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (start == MAP_FAILED) throw_no_memory("mmap of physical memory");
    try {
        fill_new_memory(start, size);
    } catch (...) {
        munmap(start, size);
        throw;
    }
    munmap(start, size);
}

}  // namespace

std::size_t round_up(std::size_t size, std::size_t to) {
    std::size_t up = 0;
    if (__builtin_add_overflow(size, to - 1, &up)) {
        throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION, std::to_string(size) + " bytes are more than any memory has");
    }
    return up / to * to;
}

std::size_t page_bytes() {
    static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

PhysicalMemory::PhysicalMemory(std::int32_t device, std::size_t size) : device_(device), size_(size), file_(-1) {
    // Charged first: a size that was charged also fits a file.
    charge(device, size);
    try {
        file_ = memfd_create("host_npu", MFD_CLOEXEC);
        if (file_ < 0 || ftruncate(file_, static_cast<off_t>(size)) != 0) throw_no_memory("the memory file");
        fill_file(file_, size);
    } catch (...) {
        if (file_ >= 0) close(file_);
        discharge(device, size);
        throw;
    }
}

PhysicalMemory::~PhysicalMemory() {
    close(file_);
    discharge(device_, size_);
}

DeviceMemory& DeviceMemory::instance() {
    // Never destroyed: tensors may outlive every static object.
    static auto& memory = *new DeviceMemory;
    return memory;
}

DeviceMemory::DeviceMemory()
    : base_(as_number(reserve_addresses())),
      alias_offset_(static_cast<std::ptrdiff_t>(as_number(reserve_addresses()) - base_)),
      addresses_(address_bytes()) {
    explain_memory_faults(base_, as_number(alias_of(base_)), address_bytes());
}

void* DeviceMemory::alias_of(std::uintptr_t address) const {
    return reinterpret_cast<void*>(address + static_cast<std::uintptr_t>(alias_offset_));
}

std::uintptr_t DeviceMemory::take(std::size_t size, std::size_t alignment) {
    const auto offset = addresses_.take(size, alignment);
    if (!offset) throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION, "the device addresses are used up");
    return base_ + *offset;
}

void* DeviceMemory::allocate(std::int32_t device, std::size_t size, std::size_t padding) {
    require(size > 0, "size is 0");
    const std::lock_guard lock(mutex_);
    // Charged first: the sums below cannot overflow for a size that was charged.
    charge(device, size);
    constexpr std::size_t kBlock = 32;
    const auto usable = strict_memory() ? size : round_up(size, kBlock) + padding;
    // A guard page follows every allocation, so that a kernel that overruns it faults.
    const auto pages = round_up(usable, page_bytes());
    const auto taken = pages + page_bytes();
    std::uintptr_t address = 0;
    try {
        address = take(taken, size >= kHugePage ? kHugePage : page_bytes());
    } catch (...) {
        discharge(device, size);
        throw;
    }
    void* const alias = alias_of(address);
    try {
        if (mprotect(alias, pages, PROT_READ | PROT_WRITE) != 0) throw_no_memory("mprotect");
        madvise(alias, pages, MADV_HUGEPAGE);
        fill_new_memory(alias, pages);
    } catch (...) {
        make_unusable(alias, taken);
        addresses_.give_back(address - base_, taken);
        discharge(device, size);
        throw;
    }
    live_.emplace(address, Live{size, usable, taken, device, next_serial_++, nullptr});
    return reinterpret_cast<void*>(address);
}

void DeviceMemory::release(void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(as_number(pointer));
    if (found == live_.end() || found->second.memory != nullptr) {
        throw Error(ACL_ERROR_RT_PARAM_INVALID,
                    hexadecimal(as_number(pointer)) + " is not the start of memory from aclrtMalloc");
    }
    make_unusable(alias_of(found->first), found->second.taken);
    discharge(found->second.device, found->second.size);
    addresses_.give_back(found->first - base_, found->second.taken);
    live_.erase(found);
}

void* DeviceMemory::reserve(std::size_t size, std::size_t alignment) {
    require(size > 0, "size is 0");
    const std::lock_guard lock(mutex_);
    const auto taken = round_up(size, page_bytes());
    const auto address = take(taken, alignment == 0 ? kHugePage : round_up(alignment, page_bytes()));
    reserved_.emplace(address, taken);
    return reinterpret_cast<void*>(address);
}

void DeviceMemory::unreserve(void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto found = reserved_.find(as_number(pointer));
    require(found != reserved_.end(), "virPtr was not reserved by aclrtReserveMemAddress");
    const auto mapped = live_.lower_bound(found->first);
    require(mapped == live_.end() || mapped->first >= found->first + found->second, "virPtr is still mapped");
    addresses_.give_back(found->first - base_, found->second);
    reserved_.erase(found);
}

void DeviceMemory::map(void* pointer, std::size_t size, std::size_t offset,
                       std::shared_ptr<const PhysicalMemory> memory) {
    require(size > 0 && size % page_bytes() == 0 && offset % page_bytes() == 0,
            "size and offset must be multiples of " + std::to_string(page_bytes()));
    require(offset <= memory->size() && size <= memory->size() - offset, "size is more than the physical memory has");
    const std::lock_guard lock(mutex_);
    const auto address = as_number(pointer);
    auto owner = reserved_.upper_bound(address);
    require(owner != reserved_.begin(), "virPtr is not reserved");
    --owner;
    const auto before = address - owner->first;
    require(before <= owner->second && size <= owner->second - before, "virPtr is not reserved for so many bytes");
    const auto next = live_.lower_bound(address);
    require(next == live_.end() || next->first >= address + size, "virPtr is mapped already");
    constexpr int flags = MAP_SHARED | MAP_FIXED;
    if (mmap(alias_of(address), size, PROT_READ | PROT_WRITE, flags, memory->file(), static_cast<off_t>(offset)) ==
        MAP_FAILED) {
        throw_system_error("mmap of physical memory");
    }
    const auto device = memory->device();
    live_.emplace(address, Live{size, size, size, device, next_serial_++, std::move(memory)});
}

void DeviceMemory::unmap(void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(as_number(pointer));
    require(found != live_.end() && found->second.memory != nullptr, "virPtr is not mapped by aclrtMapMem");
    make_unusable(alias_of(found->first), found->second.size);
    live_.erase(found);
}

bool DeviceMemory::contains(const void* pointer) const {
    const auto address = as_number(pointer);
    return address >= base_ && address - base_ < address_bytes();
}

DeviceMemory::LiveRanges::const_iterator DeviceMemory::find(std::uintptr_t address) const {
    auto range = live_.upper_bound(address);
    if (range == live_.begin()) return live_.end();
    --range;
    return address < range->first + range->second.usable ? range : live_.end();
}

void* DeviceMemory::alias(const void* pointer, std::size_t size) const {
    const std::shared_lock lock(mutex_);
    const auto address = as_number(pointer);
    auto range = find(address);
    if (range == live_.end()) throw std::out_of_range(hexadecimal(address) + " is not live device memory");
    const auto first = range;
    // Adjacent mapped ranges count as one.
    auto end = range->first + range->second.usable;
    while (end - address < size) {
        const auto next = std::next(range);
        if (next == live_.end() || next->first != end) {
            throw std::out_of_range("device memory at " + hexadecimal(address) + " ends after " +
                                    std::to_string(end - address) + " bytes, not " + std::to_string(size));
        }
        range = next;
        end = range->first + range->second.usable;
    }
    if (auto* const shadow = ShadowMemory::of_thread()) return in_shadow(*shadow, address, first, range);
    return alias_of(address);
}

void* DeviceMemory::in_shadow(ShadowMemory& shadow, std::uintptr_t address, LiveRanges::const_iterator first,
                              LiveRanges::const_iterator last) const {
    for (auto range = first;; ++range) {
        const auto pages = round_up(range->second.usable, page_bytes());
        shadow.include(range->first, pages, range->second.serial, alias_of(range->first));
        if (range == last) return shadow.address_of(address);
    }
}

std::unique_ptr<ShadowMemory> DeviceMemory::shadow() const {
    return std::make_unique<ShadowMemory>(base_, address_bytes());
}

std::optional<std::int32_t> DeviceMemory::device_of(const void* pointer) const {
    const std::shared_lock lock(mutex_);
    const auto range = find(as_number(pointer));
    if (range == live_.end()) return std::nullopt;
    return range->second.device;
}

void* host_alias(const void* device_pointer, std::size_t size) {
    return DeviceMemory::instance().alias(device_pointer, size);
}

}  // namespace host_npu
