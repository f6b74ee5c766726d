// Copies between host and devices, and memset.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <tuple>
#include <vector>

#include "acl/acl.h"
#include "ascendcl/context.h"
#include "ascendcl/error.h"
#include "ascendcl/host_memory.h"
#include "ascendcl/memory.h"
#include "ascendcl/queue.h"

using namespace host_npu;

namespace {

struct Copy {
    void* to;
    const void* from;
    std::size_t size;
};

// Rows of `size` bytes each. A plain copy is one row.
struct Rows {
    Copy first;
    std::size_t to_pitch;
    std::size_t from_pitch;
    std::size_t count;
};

bool is_device(const void* pointer) { return DeviceMemory::instance().contains(pointer); }

void require_side(const void* pointer, bool wants_device, const char* argument) {
    require(pointer, argument);
    if (is_device(pointer) != wants_device) {
        throw Error(ACL_ERROR_RT_PARAM_INVALID, std::string(argument) + " is " + (wants_device ? "host" : "device") +
                                                    " memory, which the kind of the copy excludes");
    }
}

struct Kind {
    aclrtMemcpyKind kind;
    bool to_device;
    bool from_device;
};
constexpr Kind kKinds[] = {
    {ACL_MEMCPY_HOST_TO_HOST, false, false},         {ACL_MEMCPY_HOST_TO_DEVICE, true, false},
    {ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE, true, false}, {ACL_MEMCPY_DEVICE_TO_HOST, false, true},
    {ACL_MEMCPY_DEVICE_TO_DEVICE, true, true},       {ACL_MEMCPY_INNER_DEVICE_TO_DEVICE, true, true},
    {ACL_MEMCPY_INTER_DEVICE_TO_DEVICE, true, true},
};

void check_kind(const Copy& copy, aclrtMemcpyKind kind) {
    require(copy.to, "dst");
    require(copy.from, "src");
    if (kind == ACL_MEMCPY_DEFAULT) return;
    const auto* const found = std::ranges::find(kKinds, kind, &Kind::kind);
    require(found != std::end(kKinds), "there is no kind of copy " + std::to_string(kind));
    require_side(copy.to, found->to_device, "dst");
    require_side(copy.from, found->from_device, "src");
}

// Returns the address at which the host accesses `size` bytes of host or device memory.
void* reachable(const void* pointer, std::size_t size) {
    return is_device(pointer) ? DeviceMemory::instance().alias(pointer, size) : const_cast<void*>(pointer);
}

void perform(const Copy& copy) {
    if (copy.size > 0) std::memmove(reachable(copy.to, copy.size), reachable(copy.from, copy.size), copy.size);
}

Copy row(const Rows& rows, std::size_t index) {
    return {static_cast<char*>(rows.first.to) + index * rows.to_pitch,
            static_cast<const char*>(rows.first.from) + index * rows.from_pitch, rows.first.size};
}

void perform(const Rows& rows) {
    for (std::size_t index = 0; index < rows.count; ++index) perform(row(rows, index));
}

// Refuses ranges that exceed the address space.
void require_addresses(const void* pointer, std::size_t size, const char* argument) {
    constexpr auto last = std::numeric_limits<std::uintptr_t>::max();
    require(size <= last - as_number(pointer), std::string(argument) + " has fewer bytes than the copy wants");
}

void require_room(std::size_t size, std::size_t room, const char* limit, const char* argument = "count") {
    if (size <= room) return;
    throw Error(ACL_ERROR_RT_PARAM_INVALID, std::string(argument) + " must be at most " + limit + ", which is " +
                                                std::to_string(room) + ", got " + std::to_string(size));
}

// Refuses, on the calling thread, copies that would fault on the stream.
void check(const Copy& copy, std::size_t room, aclrtMemcpyKind kind) {
    require_queue();
    require(copy.size > 0, "count is 0");
    require_addresses(copy.to, copy.size, "dst");
    require_addresses(copy.from, copy.size, "src");
    require_room(copy.size, room, "destMax");
    check_kind(copy, kind);
    reachable(copy.to, copy.size);
    reachable(copy.from, copy.size);
}

void check(const Rows& rows, aclrtMemcpyKind kind) {
    require(rows.count > 0, "height is 0");
    require_room(rows.first.size, rows.to_pitch, "dpitch", "width");
    require_room(rows.first.size, rows.from_pitch, "spitch", "width");
    for (const auto& [start, pitch, argument] :
         {std::tuple{static_cast<const void*>(rows.first.to), rows.to_pitch, "dst"},
          std::tuple{rows.first.from, rows.from_pitch, "src"}}) {
        std::size_t all = 0;
        const bool overflows = __builtin_mul_overflow(pitch, rows.count, &all);
        require(!overflows, std::string(argument) + "'s pitch times height is beyond 64 bits");
        require_addresses(start, all, argument);
    }
    check(rows.first, rows.to_pitch, kind);
    const bool is_on_device = is_device(rows.first.to) || is_device(rows.first.from);
    for (std::size_t index = 1; is_on_device && index < rows.count; ++index)
        check(row(rows, index), rows.to_pitch, kind);
}

std::vector<Copy> batch(void** dsts, const size_t* rooms, void** srcs, const size_t* sizes, size_t count,
                        size_t* failIndex) {
    require(dsts, "dsts");
    require(rooms, "destMaxs");
    require(srcs, "srcs");
    require(sizes, "sizes");
    std::vector<Copy> copies;
    copies.reserve(count);
    for (size_t index = 0; index < count; ++index) {
        if (failIndex != nullptr) *failIndex = index;
        copies.push_back({dsts[index], srcs[index], sizes[index]});
        check(copies.back(), rooms[index], ACL_MEMCPY_DEFAULT);
    }
    return copies;
}

bool is_page_locked(const void* pointer) { return is_device(pointer) || HostMemory::instance().contains(pointer); }
bool is_page_locked(const Copy& copy) { return is_page_locked(copy.to) && is_page_locked(copy.from); }

// A copy from or to pageable host memory blocks the host, which a capture forbids.
void require_page_locked(const Stream& stream, const Copy& copy) {
    if (is_page_locked(copy)) return;
    constexpr const char* what = "a copy of host memory that is not page-locked (pinned)";
    require_safe(what);
    require_uncaptured(stream, what);
}

// Enqueues copies. As CANN documents, blocks until copies of pageable host memory are done; their faults are raised by
// the next synchronization. A capture does not change host memory.
void enqueue(aclrtStream stream, const char* name, std::span<const Copy> copies, std::function<void()> work) {
    const auto target = stream_of(stream);
    bool writes_to_host = false, is_awaited = false;
    for (const auto& copy : copies) {
        if (captures_are_under_way()) require_page_locked(*target, copy);
        writes_to_host |= !is_device(copy.to);
        is_awaited |= !is_page_locked(copy);
    }
    target->enqueue(
        {.name = name, .work = std::move(work), .captured = writes_to_host ? Captured::recorded : Captured::rehearsed});
    if (is_awaited) target->finish();
}

std::int32_t copy_on_stream(const char* function, const Copy& copy, std::size_t room, aclrtMemcpyKind kind,
                            aclrtStream stream) {
    return run_api(function, [&] {
        check(copy, room, kind);
        enqueue(stream, function, {&copy, 1}, [copy] { perform(copy); });
    });
}

void fill(void* pointer, int value, std::size_t size) { std::memset(reachable(pointer, size), value, size); }

void check_fill(void* pointer, std::size_t room, std::size_t size) {
    require_queue();
    require_side(pointer, true, "devPtr");
    require_room(size, room, "maxCount");
    reachable(pointer, size);
}

}  // namespace

aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind) {
    return run_api(__func__, [&] {
        require_safe("a copy that the host waits for");
        const Copy copy{dst, src, count};
        check(copy, destMax, kind);
        perform(copy);
    });
}

aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    return copy_on_stream(__func__, {dst, src, count}, destMax, kind, stream);
}

aclError aclrtMemcpyAsyncWithCondition(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    return copy_on_stream(__func__, {dst, src, count}, destMax, kind, stream);
}

aclError aclrtMemcpy2d(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                       aclrtMemcpyKind kind) {
    return run_api(__func__, [&] {
        require_safe("a copy that the host waits for");
        const Rows rows{{dst, src, width}, dpitch, spitch, height};
        check(rows, kind);
        perform(rows);
    });
}

aclError aclrtMemcpy2dAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                            aclrtMemcpyKind kind, aclrtStream stream) {
    return run_api(__func__, [&] {
        const Rows rows{{dst, src, width}, dpitch, spitch, height};
        check(rows, kind);
        enqueue(stream, "aclrtMemcpy2dAsync", {&rows.first, 1}, [rows] { perform(rows); });
    });
}

aclError aclrtMemcpyBatch(void** dsts, size_t* destMaxs, void** srcs, size_t* sizes, size_t numBatches,
                          aclrtMemcpyBatchAttr*, size_t*, size_t, size_t* failIndex) {
    return run_api(__func__, [&] {
        require_safe("a copy that the host waits for");
        for (const auto& copy : batch(dsts, destMaxs, srcs, sizes, numBatches, failIndex)) perform(copy);
    });
}

aclError aclrtMemcpyBatchAsync(void** dsts, size_t* destMaxs, void** srcs, size_t* sizes, size_t numBatches,
                               aclrtMemcpyBatchAttr*, size_t*, size_t, size_t* failIndex, aclrtStream stream) {
    return run_api(__func__, [&] {
        const auto copies = batch(dsts, destMaxs, srcs, sizes, numBatches, failIndex);
        enqueue(stream, "aclrtMemcpyBatchAsync", copies, [copies] {
            for (const auto& copy : copies) perform(copy);
        });
    });
}

aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count) {
    return run_api(__func__, [&] {
        require_safe("a fill that the host waits for");
        check_fill(devPtr, maxCount, count);
        fill(devPtr, value, count);
    });
}

aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream) {
    return run_api(__func__, [&] {
        check_fill(devPtr, maxCount, count);
        stream_of(stream)->enqueue("aclrtMemsetAsync", [=] { fill(devPtr, value, count); });
    });
}
