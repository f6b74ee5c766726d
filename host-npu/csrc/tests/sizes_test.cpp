// Sizes, counts and pitches beyond any memory, and empty tensors where a kernel reads an element.
#include <dlfcn.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "hccl/hccl.h"
#include "tests/calls.h"
#include "tests/ranks.h"

namespace {

using namespace test;

constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
constexpr aclError kInvalid = 107000;
constexpr aclError kNoMemory = 207001;
constexpr aclError kFault = 507015;

// Returns 0 with torch_npu 2.9, which does not use the function, so that the library does not have it.
std::size_t used_bytes() {
    const auto ask = reinterpret_cast<decltype(&aclrtGetMemUsageInfo)>(dlsym(RTLD_DEFAULT, "aclrtGetMemUsageInfo"));
    if (ask == nullptr) return 0;
    aclrtMemUsageInfo used{};
    std::size_t count = 0;
    expect_equal(ask(0, &used, 1, &count), 0, "the status of the question");
    return used.curMemSize;
}

CASE("sizes/more_than_any_memory_has_is_not_allocated") {
    // With memory in use, adding the requested size to it would overflow.
    const Memory used(100);
    const auto before = used_bytes();
    for (const auto size : {kMost, kMost - 31, kMost - 50, kMost - 99, kMost / 2 + 1, kMost / 2}) {
        void* address = nullptr;
        aclrtDrvMemHandle handle = nullptr;
        aclrtPhysicalMemProp properties{};
        properties.location = {0, ACL_MEM_LOCATION_TYPE_DEVICE};
        const std::pair<const char*, aclError> statuses[] = {
            {"aclrtMalloc", aclrtMalloc(&address, size, ACL_MEM_MALLOC_HUGE_FIRST)},
            {"aclrtMallocAlign32", aclrtMallocAlign32(&address, size, ACL_MEM_MALLOC_HUGE_FIRST)},
            {"aclrtMallocHost", aclrtMallocHost(&address, size)},
            {"aclrtMallocPhysical", aclrtMallocPhysical(&handle, size, &properties, 0)},
            {"aclrtReserveMemAddress", aclrtReserveMemAddress(&address, size, 0, nullptr, 0)},
        };
        for (const auto& [function, status] : statuses) {
            expect_equal(status, kNoMemory, function, "(", size, "): the status");
        }
        expect(address == nullptr && handle == nullptr, "something was given for ", size, " bytes");
        expect_equal(used_bytes(), before, "the used memory after ", size, " bytes");
    }
    recent_error();
}

CASE("sizes/no_more_is_mapped_than_is_reserved_and_there") {
    aclrtPhysicalMemProp properties{};
    properties.location = {0, ACL_MEM_LOCATION_TYPE_DEVICE};
    aclrtDrvMemHandle handle = nullptr;
    void* address = nullptr;
    const std::size_t bytes = std::size_t{2} << 20;
    expect_equal(aclrtMallocPhysical(&handle, bytes, &properties, 0), 0, "physical memory");
    expect_equal(aclrtReserveMemAddress(&address, bytes, 0, nullptr, 0), 0, "addresses");
    const std::size_t whole = kMost - bytes + 1;
    expect_equal(aclrtMapMem(address, bytes, whole, handle, 0), kInvalid, "an offset that overflows");
    expect_equal(aclrtMapMem(address, whole, bytes, handle, 0), kInvalid, "a size that overflows");
    expect_equal(aclrtMapMem(address, bytes, bytes, handle, 0), kInvalid, "an offset at the end");
    expect_equal(aclrtMapMem(address, bytes, 0, handle, 0), 0, "all of it");
    expect_equal(aclrtUnmapMem(address), 0, "the status of unmapping");
    expect_equal(aclrtReleaseMemAddress(address), 0, "the status of releasing");
    expect_equal(aclrtFreePhysical(handle), 0, "the status of freeing");
    recent_error();
}

CASE("sizes/no_more_host_memory_is_registered_than_there_are_addresses") {
    std::uint64_t here = 0;
    expect_equal(aclrtHostRegisterV2(&here, kMost, ACL_HOST_REG_PINNED), kInvalid, "the status");
    aclrtPtrAttributes attributes{};
    expect_equal(aclrtPointerGetAttributes(&here, &attributes), 0, "the status of the question");
    expect_equal(attributes.location.type, ACL_MEM_LOCATION_TYPE_UNREGISTERED, "the place");
    recent_error();
}

CASE("sizes/no_more_is_copied_or_filled_than_memory_has") {
    const Memory memory(4096), other(4096);
    std::vector<std::uint8_t> here(4096);
    const Stream stream;
    void* const to = memory.address();
    const auto host = ACL_MEMCPY_HOST_TO_DEVICE;
    const auto device = ACL_MEMCPY_DEVICE_TO_DEVICE;
    const std::size_t half = kMost / 2 + 1;
    const std::pair<const char*, aclError> statuses[] = {
        {"a copy", aclrtMemcpy(to, kMost, here.data(), kMost, host)},
        {"a copy within the host", aclrtMemcpy(here.data(), kMost, here.data(), kMost, ACL_MEMCPY_HOST_TO_HOST)},
        {"a copy on a stream", aclrtMemcpyAsync(to, kMost, here.data(), kMost, host, stream.handle)},
        {"a fill", aclrtMemset(to, kMost, 0, kMost)},
        {"a fill on a stream", aclrtMemsetAsync(to, kMost, 0, kMost, stream.handle)},
        {"a pitch that overflows", aclrtMemcpy2d(to, half, here.data(), half, 16, 3, host)},
        {"a pitch of the source that overflows", aclrtMemcpy2d(to, 16, here.data(), half, 16, 3, host)},
        {"a pitch on the device", aclrtMemcpy2d(to, half, other.address(), half, 16, 3, device)},
        {"a pitch on a stream", aclrtMemcpy2dAsync(to, half, here.data(), half, 16, 3, host, stream.handle)},
        {"rows that wrap around", aclrtMemcpy2d(to, 16, here.data(), 16, 16, kMost / 16 + 2, host)},
        {"rows behind the end", aclrtMemcpy2d(to, 16, other.address(), 16, 16, 1000, device)},
        {"a pitch of 0", aclrtMemcpy2d(to, 64, here.data(), 0, 16, 2, host)},
    };
    for (const auto& [name, status] : statuses) expect_equal(status, kInvalid, name, ": the status");
    recent_error();
    expect_equal(stream.wait(), 0, "the stream's status");
}

CASE("sizes/every_row_of_a_copy_has_to_be_memory") {
    // The first and the last row are mapped, a row in between is not.
    std::vector<Memory> memories;
    for (int count = 0; count < 3; ++count) memories.emplace_back(1);
    auto* const first = static_cast<std::uint8_t*>(memories[0].address());
    auto* const last = static_cast<std::uint8_t*>(memories[2].address());
    auto* const between = static_cast<std::uint8_t*>(memories[1].address());
    if (last - between != between - first || last < first) return;
    memories[1] = Memory(1 << 20);
    memories[0].upload({7});
    std::vector<std::uint8_t> here{1, 2, 3};
    const auto pitch = static_cast<std::size_t>(between - first);
    std::vector<std::uint8_t> rows(3 * pitch);
    expect_equal(aclrtMemcpy2d(first, pitch, rows.data(), pitch, 1, 3, ACL_MEMCPY_HOST_TO_DEVICE), kInvalid,
                 "the status");
    expect_equal(memories[0].download()[0], 7, "the first row");
    recent_error();
}

CASE("sizes/an_array_is_not_larger_than_memory") {
    const std::int64_t value = 0;
    expect(aclCreateIntArray(&value, kMost) == nullptr, "there is an array of 2^64 - 1 integers");
    expect(aclCreateIntArray(&value, kMost / 2 + 1) == nullptr, "there is an array of 2^63 integers");
    expect(recent_error().has_value(), "no message");
}

CASE("sizes/hccl_sends_no_more_than_its_limit") {
    const Ranks ranks(1);
    const Memory memory(64);
    void* const data = memory.address();
    const auto comm = ranks.comm(0);
    const auto stream = ranks.stream(0);
    const auto dtype = HCCL_DATA_TYPE_INT64;
    std::uint64_t most[] = {kMost}, none[] = {0};
    HcclSendRecvItem items[] = {{HCCL_SEND, data, kMost / 8 + 2, dtype, 0}, {HCCL_RECV, data, kMost / 8 + 2, dtype, 0}};
    const std::pair<const char*, HcclResult> statuses[] = {
        {"all_reduce", HcclAllReduce(data, data, kMost, dtype, HCCL_REDUCE_SUM, comm, stream)},
        {"broadcast", HcclBroadcast(data, kMost / 8 + 2, dtype, 0, comm, stream)},
        {"all_gather", HcclAllGather(data, data, kMost, dtype, comm, stream)},
        {"all_to_all", HcclAlltoAllV(data, most, none, dtype, data, most, none, dtype, comm, stream)},
        {"all_to_all, places", HcclAlltoAllV(data, none, most, dtype, data, none, most, dtype, comm, stream)},
        {"all_to_all, matrix", HcclAlltoAllVC(data, most, dtype, data, dtype, comm, stream)},
        {"send", HcclBatchSendRecv(items, 1, comm, stream)},
        {"receive", HcclBatchSendRecv(items + 1, 1, comm, stream)},
    };
    for (const auto& [name, status] : statuses) {
        expect_equal(status, HCCL_E_PARA, name, ": the status");
    }
    recent_error();
    ranks.wait();
}

CASE("sizes/adam_without_a_step_is_a_fault") {
    for (const auto& shape : {Shape{0}, Shape{3, 0}}) {
        EmaAdam call;
        call.step = Tensor(ACL_INT64, shape, {});
        const auto phase = phase_one(call);
        expect_equal(phase.status, 0, "phase one's status");
        expect_equal(launch(call, phase), kFault, "the synchronization's status");
        expect(recent_error().value_or("").find("step has no element") != std::string::npos, "the text");
    }
}

struct Descriptor {
    Descriptor(const Shape& shape, aclFormat format, const Shape& storage)
        : handle(aclCreateTensorDesc(ACL_FLOAT16, static_cast<int>(shape.size()), shape.data(), ACL_FORMAT_ND)) {
        aclSetTensorFormat(handle, format);
        aclSetTensorShape(handle, static_cast<int>(storage.size()), storage.data());
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() { aclDestroyTensorDesc(handle); }

    aclTensorDesc* handle;
};

struct IdentityRow {
    const char* name;
    Shape shape;
    Shape tiles;
    bool is_taken;
};

CASE("sizes/identity_takes_tiles_that_have_room") {
    constexpr std::int64_t huge = std::int64_t{1} << 62;
    const IdentityRow table[] = {
        {"one tile", {16, 16}, {1, 1, 16, 16}, true},
        {"two matrices", {2, 16, 16}, {2, 1, 1, 16, 16}, true},
        {"no elements", {0, 16}, {1, 0, 16, 16}, true},
        {"a tile of 0 rows", {16, 16}, {1, 1, 0, 16}, false},
        {"a tile of 0 columns", {16, 16}, {1, 1, 16, 0}, false},
        {"a tile of -16 rows", {16, 16}, {1, -1, -16, 16}, false},
        {"fewer tiles than rows", {160, 16}, {1, 1, 16, 16}, false},
        {"fewer tiles than columns", {16, 160}, {1, 1, 16, 16}, false},
        {"fewer matrices", {2, 16, 16}, {1, 1, 1, 16, 16}, false},
        {"much less", {4096, 4}, {1, 1, 1, 1}, false},
        {"a negative size", {-2, -2}, {1, 1, 16, 16}, false},
    };
    const Memory rows(1 << 16), tiled(1 << 16);
    const Stream stream;
    auto* const source = aclCreateDataBuffer(rows.address(), 1 << 16);
    auto* const target = aclCreateDataBuffer(tiled.address(), 1 << 16);
    const auto identity = [&](const Descriptor& from, aclDataBuffer* read, const Descriptor& to, aclDataBuffer* write) {
        return aclopCompileAndExecute("Identity", 1, &from.handle, &read, 1, &to.handle, &write, nullptr,
                                      ACL_ENGINE_SYS, ACL_COMPILE_SYS, nullptr, stream.handle);
    };
    for (const auto& row : table) {
        const Descriptor plain(row.shape, ACL_FORMAT_ND, row.shape);
        const Descriptor nz(row.shape, ACL_FORMAT_FRACTAL_NZ, row.tiles);
        expect_equal(identity(plain, source, nz, target) == 0, row.is_taken, row.name, ": to tiles");
        expect_equal(identity(nz, target, plain, source) == 0, row.is_taken, row.name, ": from tiles");
        expect_equal(stream.wait(), 0, row.name, ": the synchronization's status");
        recent_error();
    }
    const Shape too_large{huge, 4};
    const Descriptor plain(too_large, ACL_FORMAT_ND, too_large);
    expect_equal(identity(plain, source, plain, target), 0, "a product that overflows");
    expect_equal(stream.wait(), kFault, "a product that overflows: the synchronization's status");
    recent_error();
    aclDestroyDataBuffer(source);
    aclDestroyDataBuffer(target);
}

}  // namespace
