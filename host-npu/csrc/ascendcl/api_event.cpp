// Events.
#include "acl/acl.h"
#include "ascendcl/context.h"
#include "ascendcl/error.h"
#include "ascendcl/queue.h"

using namespace host_npu;

namespace {

std::int32_t create(const char* function, aclrtEvent* event, std::uint32_t flags) {
    return answer(function, event, "event", [&] { return events().add(std::make_shared<Event>(flags)); });
}

Clock::time_point time_of(const void* handle) {
    const auto event = events().get(handle);
    if ((event->flags() & ACL_EVENT_TIME_LINE) == 0) {
        throw Error(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event was created without ACL_EVENT_TIME_LINE");
    }
    const auto time = event->time();
    if (!time) throw Error(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event was not recorded, or not reached yet");
    return *time;
}

}  // namespace

aclError aclrtCreateEvent(aclrtEvent* event) {
    return create(__func__, event, ACL_EVENT_SYNC | ACL_EVENT_CAPTURE_STREAM_PROGRESS | ACL_EVENT_TIME_LINE);
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return create(__func__, event, flag); }

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) { return create(__func__, event, flag); }

aclError aclrtDestroyEvent(aclrtEvent event) {
    return run_api(__func__, [&] { events().remove(event); });
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    return run_api(__func__, [&] { events().get(event)->record(*stream_of(stream)); });
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
    return run_api(__func__, [&] { events().get(event)->reset(*stream_of(stream)); });
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    return run_api(__func__, [&] { events().get(event)->block(*stream_of(stream)); });
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
    return answer(__func__, status, "status", [&] {
        return events().get(event)->is_complete() ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                                  : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    });
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
    return answer(__func__, status, "status", [&] {
        return events().get(event)->is_complete() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    });
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
    return run_api(__func__, [&] {
        require_queue();
        events().get(event)->synchronize(std::nullopt);
    });
}

extern "C" HOST_NPU_EXPORT aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout) {
    return run_api(__func__, [&] {
        require_queue();
        events().get(event)->synchronize(timeout_from(timeout));
    });
}

aclError aclrtEventElapsedTime(float* ms, aclrtEvent startEvent, aclrtEvent endEvent) {
    return answer(__func__, ms, "ms", [&] {
        const auto start = time_of(startEvent);
        const auto end = time_of(endEvent);
        if (end < start) throw Error(ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL, "the end is before the start");
        return std::chrono::duration<float, std::milli>(end - start).count();
    });
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* timestamp) {
    return answer(__func__, timestamp, "timestamp", [&] {
        const auto since = time_of(event).time_since_epoch();
        return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(since).count());
    });
}

aclError aclrtIpcGetEventHandle(aclrtEvent, aclrtIpcEventHandle*) { return not_shared(__func__, "events"); }

aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle, aclrtEvent*) { return not_shared(__func__, "events"); }
