// Synchronization with streams and events.
#include <cstdint>
#include <vector>

#include "acl/acl.h"
#include "tests/device.h"

// Missing in the headers of torch_npu 2.9.
extern "C" aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout);

namespace {

using namespace test;

constexpr aclError kInvalid = 107000;

struct WaitRow {
    const char* name;
    std::uint32_t condition;
    std::uint64_t value;
    std::uint64_t before;
    std::uint64_t written;
};

CASE("streams/wait_for_a_value_in_memory") {
    const Memory memory(8);
    const WaitRow table[] = {
        {"at least", ACL_STREAM_WAIT_VALUE_GEQ, 5, 4, 6},
        {"equal", ACL_STREAM_WAIT_VALUE_EQ, 5, 6, 5},
        {"a common bit", ACL_STREAM_WAIT_VALUE_AND, 4, 3, 5},
        {"a bit in neither", ACL_STREAM_WAIT_VALUE_NOR, 1, ~std::uint64_t{1}, 0},
    };
    for (const auto& row : table) {
        const Stream writer, waiter;
        expect_equal(aclrtValueWrite(memory.address(), row.before, 0, writer.handle), 0, row.name);
        expect_equal(writer.wait(), 0, row.name, ": the first write");
        expect_equal(aclrtValueWait(memory.address(), row.value, row.condition, waiter.handle), 0, row.name,
                     ": the status of the wait");
        expect_equal(aclrtSynchronizeStreamWithTimeout(waiter.handle, 20), 507046, row.name,
                     ": the status before the write");
        expect_equal(aclrtValueWrite(memory.address(), row.written, 0, writer.handle), 0, row.name);
        expect_equal(waiter.wait(), 0, row.name, ": the status after the write");
        recent_error();
    }
    const Stream stream;
    expect_equal(aclrtValueWait(memory.address(), 0, 99, stream.handle), kInvalid, "no condition");
    auto* const odd = static_cast<char*>(memory.address()) + 1;
    expect_equal(aclrtValueWrite(odd, 0, 0, stream.handle), kInvalid, "an odd address");
    recent_error();
}

CASE("streams/events_are_reset_and_waited_for") {
    const Stream stream;
    aclrtEvent event = nullptr;
    expect_equal(aclrtCreateEventWithFlag(&event, ACL_EVENT_TIME_LINE), 0, "the status");
    expect_equal(aclrtRecordEvent(event, stream.handle), 0, "the status of recording");
    expect_equal(aclrtSynchronizeEvent(event), 0, "the status of waiting");
    aclrtEventWaitStatus status = ACL_EVENT_WAIT_STATUS_NOT_READY;
    expect_equal(aclrtQueryEventWaitStatus(event, &status), 0, "the status of the question");
    expect_equal(status, ACL_EVENT_WAIT_STATUS_COMPLETE, "the event's state");
    float time = -1;
    expect_equal(aclrtEventElapsedTime(&time, event, event), 0, "the status of the time");
    expect_equal(time, 0.0f, "the time from the event to itself");
    expect_equal(aclrtResetEvent(event, stream.handle), 0, "the status of the reset");
    expect_equal(stream.wait(), 0, "the synchronisation's status");
    expect(aclrtEventElapsedTime(&time, event, event) != 0, "an event that was reset has a time");
    expect_equal(aclrtDestroyEvent(event), 0, "the status of the destruction");
    recent_error();
}

// An event is recorded again on another stream, and the older record completes last.
CASE("streams/a_record_is_waited_for_whatever_the_older_ones_do") {
    const Memory memory(8);
    const Stream slow, quick, waiter;
    aclrtEvent event = nullptr;
    expect_equal(aclrtCreateEvent(&event), 0, "the status");
    expect_equal(aclrtValueWrite(memory.address(), 0, 0, quick.handle), 0, "the first write");
    expect_equal(quick.wait(), 0, "the first write's end");
    expect_equal(aclrtValueWait(memory.address(), 1, ACL_STREAM_WAIT_VALUE_EQ, slow.handle), 0,
                 "the status of the wait");
    expect_equal(aclrtRecordEvent(event, slow.handle), 0, "the first record");
    expect_equal(aclrtStreamWaitEvent(waiter.handle, event), 0, "the wait for the first record");
    expect_equal(aclrtRecordEvent(event, quick.handle), 0, "the second record");
    expect_equal(aclrtSynchronizeEvent(event), 0, "the end of the second record");
    expect_equal(aclrtSynchronizeStreamWithTimeout(waiter.handle, 20), 507046,
                 "the status before the first record is reached");
    expect_equal(aclrtValueWrite(memory.address(), 1, 0, quick.handle), 0, "the second write");
    expect_equal(slow.wait(), 0, "the end of the first record");
    expect_equal(aclrtStreamWaitEvent(waiter.handle, event), 0, "the wait for the second record");
    expect_equal(aclrtSynchronizeStreamWithTimeout(waiter.handle, 10000), 0, "the status after it");
    expect_equal(aclrtDestroyEvent(event), 0, "the status of the destruction");
    recent_error();
}

class Event {
  public:
    Event() { expect_equal(aclrtCreateEvent(&handle), 0, "the status of an event's creation"); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() { aclrtDestroyEvent(handle); }

    aclrtEvent handle = nullptr;
};

void record(const Event& event, const Stream& stream) {
    expect_equal(aclrtRecordEvent(event.handle, stream.handle), 0, "the status of a record");
}

void block(const Stream& stream, const Event& event) {
    expect_equal(aclrtStreamWaitEvent(stream.handle, event.handle), 0, "the status of a wait");
}

// Enqueues work that will fail: it fills memory that is freed in the meantime.
void queue_failure(const Stream& stream) {
    const Memory gate(8);
    const Stream opener;
    expect_equal(aclrtValueWrite(gate.address(), 0, 0, opener.handle), 0, "the first write");
    expect_equal(opener.wait(), 0, "the end of the first write");
    expect_equal(aclrtValueWait(gate.address(), 1, ACL_STREAM_WAIT_VALUE_EQ, stream.handle), 0, "the wait");
    Event passed;
    record(passed, stream);
    {
        const Memory freed(8);
        expect_equal(aclrtMemsetAsync(freed.address(), 8, 0, 8, stream.handle), 0, "the status of the failing work");
    }
    expect_equal(aclrtValueWrite(gate.address(), 1, 0, opener.handle), 0, "the second write");
    expect_equal(aclrtSynchronizeEvent(passed.handle), 0, "the status before the failing work");
}

constexpr aclError kFault = 507015;

CASE("streams/a_failure_is_reported_by_whatever_waits_for_the_work") {
    const Stream failing, waiting, waiting_for_that, apart;
    const Event first, second;
    queue_failure(failing);
    record(first, failing);
    block(waiting, first);
    record(second, waiting);
    block(waiting_for_that, second);
    expect_equal(aclrtSynchronizeEvent(first.handle), kFault, "the event after the failure");
    expect_equal(aclrtSynchronizeEventWithTimeout(second.handle, 10000), kFault, "the event of the stream that waited");
    expect_equal(waiting_for_that.wait(), kFault, "the stream that waited for that stream");
    expect_equal(waiting.wait(), kFault, "the stream that waited");
    expect_equal(apart.wait(), 0, "a stream that waited for nothing");
    expect_equal(failing.wait(), kFault, "the stream itself");
    recent_error();
}

CASE("streams/a_failure_that_was_reported_is_not_passed_on") {
    const Stream failing, waiting;
    const Event event;
    queue_failure(failing);
    expect_equal(failing.wait(), kFault, "the stream itself");
    recent_error();
    record(event, failing);
    block(waiting, event);
    expect_equal(aclrtSynchronizeEvent(event.handle), 0, "the event");
    expect_equal(waiting.wait(), 0, "the stream that waited");
}

}  // namespace
