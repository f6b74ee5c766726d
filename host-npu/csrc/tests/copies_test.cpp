// Copies and fills of device memory.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include "acl/acl.h"
#include "tests/calls.h"

namespace {

using namespace test;

using Bytes = std::vector<std::uint8_t>;

constexpr aclError kInvalid = 107000;

Bytes counting(std::size_t count) {
    Bytes bytes(count);
    std::iota(bytes.begin(), bytes.end(), std::uint8_t{1});
    return bytes;
}

void expect_bytes(const Bytes& actual, const Bytes& expected, const char* what) {
    expect(actual == expected, what, " are other bytes than expected");
}

struct CopyRow {
    const char* name;
    aclrtMemcpyKind kind;
    bool to_device;
    bool from_device;
    aclError status;
};

CASE("copies/the_kind_has_to_name_the_sides") {
    const Memory there(4), other(4);
    Bytes here(4), mine = counting(4);
    const CopyRow rows[] = {
        {"host to host", ACL_MEMCPY_HOST_TO_HOST, false, false, 0},
        {"host to device", ACL_MEMCPY_HOST_TO_DEVICE, true, false, 0},
        {"device to host", ACL_MEMCPY_DEVICE_TO_HOST, false, true, 0},
        {"device to device", ACL_MEMCPY_DEVICE_TO_DEVICE, true, true, 0},
        {"default, to device", ACL_MEMCPY_DEFAULT, true, false, 0},
        {"default, to host", ACL_MEMCPY_DEFAULT, false, true, 0},
        {"host to host, to device", ACL_MEMCPY_HOST_TO_HOST, true, false, kInvalid},
        {"host to device, from device", ACL_MEMCPY_HOST_TO_DEVICE, true, true, kInvalid},
        {"device to host, from host", ACL_MEMCPY_DEVICE_TO_HOST, false, false, kInvalid},
        {"device to device, to host", ACL_MEMCPY_DEVICE_TO_DEVICE, false, true, kInvalid},
        {"no kind", static_cast<aclrtMemcpyKind>(99), true, true, kInvalid},
    };
    for (const auto& row : rows) {
        void* const to = row.to_device ? there.address() : here.data();
        const void* const from = row.from_device ? other.address() : mine.data();
        other.upload(counting(4));
        expect_equal(aclrtMemcpy(to, 4, from, 4, row.kind), row.status, row.name, ": the status");
        expect_equal(recent_error().has_value(), row.status != 0, row.name, ": whether there is a message");
        if (row.status == 0) expect_bytes(row.to_device ? there.download() : here, counting(4), row.name);
    }
}

CASE("copies/both_ends_have_to_be_live_memory") {
    const Memory memory(4);
    const Bytes here = counting(8);
    const auto copy = [&](void* to, std::size_t room, std::size_t count) {
        return aclrtMemcpy(to, room, here.data(), count, ACL_MEMCPY_HOST_TO_DEVICE);
    };
    expect_equal(copy(memory.address(), 4, 8), kInvalid, "more than destMax: the status");
    expect(copy(memory.address(), 1 << 20, 1 << 20) != 0, "a copy beyond the memory succeeds");
    expect_equal(copy(memory.address(), 4, 0), kInvalid, "count 0: the status");
    expect_equal(copy(nullptr, 4, 4), kInvalid, "a null pointer: the status");
    recent_error();
    expect_equal(copy(memory.address(), 4, 4), 0, "a right copy: the status");
}

CASE("copies/rows_of_a_pitch") {
    const Bytes here = counting(6);
    const Memory memory(8);
    const Stream stream;
    const auto copy = [&](std::size_t width, std::size_t height) {
        return aclrtMemcpy2d(memory.address(), 4, here.data(), 3, width, height, ACL_MEMCPY_HOST_TO_DEVICE);
    };
    memory.upload(Bytes(8));
    expect_equal(copy(2, 2), 0, "the status");
    expect_bytes(memory.download(), {1, 2, 0, 0, 4, 5, 0, 0}, "two rows");
    expect_equal(copy(4, 1), kInvalid, "more than the pitch of the source: the status");
    expect_equal(copy(2, 0), kInvalid, "no rows: the status");
    recent_error();
    Bytes back(6);
    const auto status =
        aclrtMemcpy2dAsync(back.data(), 3, memory.address(), 4, 3, 2, ACL_MEMCPY_DEVICE_TO_HOST, stream.handle);
    expect_equal(status, 0, "the status of the copy on a stream");
    expect_equal(stream.wait(), 0, "the synchronisation's status");
    expect_bytes(back, {1, 2, 0, 4, 5, 0}, "the rows from the device");
}

void delay(const Stream& stream) {
    const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(30)); };
    expect_equal(aclrtLaunchHostFunc(stream.handle, sleep, nullptr), 0, "the status of the delay");
}

CASE("copies/of_memory_that_is_not_page_locked_are_done_when_the_call_returns") {
    const Memory memory(4);
    const Stream stream;
    Bytes here = counting(4);
    delay(stream);
    expect_equal(aclrtMemcpyAsync(memory.address(), 4, here.data(), 4, ACL_MEMCPY_HOST_TO_DEVICE, stream.handle), 0,
                 "the status of the copy to the device");
    std::ranges::fill(here, std::uint8_t{9});
    expect_equal(stream.wait(), 0, "the synchronisation's status");
    expect_bytes(memory.download(), counting(4), "what was copied to the device");
    delay(stream);
    expect_equal(aclrtMemcpyAsync(here.data(), 4, memory.address(), 4, ACL_MEMCPY_DEVICE_TO_HOST, stream.handle), 0,
                 "the status of the copy to the host");
    expect_bytes(here, counting(4), "what was copied to the host");
}

CASE("copies/fills") {
    const Memory memory(4);
    const Stream stream;
    Bytes here(4);
    memory.upload(counting(4));
    expect_equal(aclrtMemset(memory.address(), 4, 7, 2), 0, "the status");
    expect_bytes(memory.download(), {7, 7, 3, 4}, "the first two");
    expect_equal(aclrtMemsetAsync(memory.address(), 4, 9, 3, stream.handle), 0, "on a stream");
    expect_equal(stream.wait(), 0, "the synchronisation's status");
    expect_bytes(memory.download(), {9, 9, 9, 4}, "the first three");
    expect_equal(aclrtMemset(memory.address(), 2, 7, 3), kInvalid, "more than maxCount: the status");
    expect_equal(aclrtMemset(here.data(), 4, 7, 4), kInvalid, "host memory: the status");
    recent_error();
}

CASE("copies/every_byte_but_0_is_true") {
    InplaceCopy call;
    call.self = floats({3});
    call.src = {ACL_BOOL, {3}};
    call.src.memory().upload({0, 1, 2});
    run(call);
    expect_close(call.self.values(), {0, 1, 1}, 0, "the bools as numbers");
}

}  // namespace
