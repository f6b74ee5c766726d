// Streams, and tasks that the host enqueues directly.
#include <atomic>
#include <cstring>
#include <functional>

#include "ascendcl/acl_names.h"
#include "ascendcl/context.h"
#include "ascendcl/error.h"
#include "ascendcl/memory.h"
#include "ascendcl/queue.h"
#include "ascendcl/wake_ups.h"

using namespace host_npu;

namespace {

constexpr std::uint32_t kPriorities = 8;

std::int32_t create(const char* function, aclrtStream* stream, std::uint32_t priority, std::uint32_t flags) {
    return run_api(function, [&] {
        require(stream, "stream");
        require(priority < kPriorities, "priority must be below 8, got " + std::to_string(priority));
        *stream = streams().add(create_stream(priority, flags));
        let_new_threads_wake_up_late();
    });
}

std::function<bool(std::uint64_t)> condition(std::uint64_t value, std::uint32_t flag) {
    switch (flag) {
        case ACL_STREAM_WAIT_VALUE_GEQ:
            return [value](std::uint64_t found) { return static_cast<std::int64_t>(found - value) >= 0; };
        case ACL_STREAM_WAIT_VALUE_EQ:
            return [value](std::uint64_t found) { return found == value; };
        case ACL_STREAM_WAIT_VALUE_AND:
            return [value](std::uint64_t found) { return (found & value) != 0; };
        case ACL_STREAM_WAIT_VALUE_NOR:
            return [value](std::uint64_t found) { return ~(found | value) != 0; };
        default:
            throw Error(ACL_ERROR_RT_PARAM_INVALID, "there is no condition " + std::to_string(flag));
    }
}

std::atomic_ref<std::uint64_t> device_value(void* pointer) {
    require(reinterpret_cast<std::uintptr_t>(pointer) % sizeof(std::uint64_t) == 0, "devAddr is not aligned");
    auto* const alias = DeviceMemory::instance().alias(pointer, sizeof(std::uint64_t));
    return std::atomic_ref(*static_cast<std::uint64_t*>(alias));
}

}  // namespace

aclError aclrtCreateStream(aclrtStream* stream) { return create(__func__, stream, 0, 0); }

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority, uint32_t flag) {
    return create(__func__, stream, priority, flag);
}

aclError aclrtDestroyStream(aclrtStream stream) {
    return run_api(__func__, [&] {
        require_uncaptured(*streams().get(stream), "to destroy a stream");
        streams().remove(stream);
    });
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
    return run_api(__func__, [&] {
        require_uncaptured(*streams().get(stream), "to destroy a stream");
        streams().remove(stream)->abandon();
    });
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
    return run_api(__func__, [&] {
        require_queue();
        stream_of(stream)->synchronize(timeout_from(timeout));
    });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    return run_api(__func__, [&] {
        require_queue();
        stream_of(stream)->synchronize(std::nullopt);
    });
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
    return answer(__func__, status, "status", [&] {
        const auto target = stream_of(stream);
        require_uncaptured(*target, "to query a stream");
        return target->is_idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    });
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* streamId) {
    return answer(__func__, streamId, "streamId", [&] { return stream_of(stream)->id(); });
}

aclError aclrtStreamGetPriority(aclrtStream stream, uint32_t* priority) {
    return answer(__func__, priority, "priority", [&] { return stream_of(stream)->priority(); });
}

aclError aclrtStreamGetFlags(aclrtStream stream, uint32_t* flags) {
    return answer(__func__, flags, "flags", [&] { return stream_of(stream)->flags(); });
}

aclError aclrtDeviceGetStreamPriorityRange(int32_t* leastPriority, int32_t* greatestPriority) {
    return run_api(__func__, [&] {
        require(leastPriority, "leastPriority");
        require(greatestPriority, "greatestPriority");
        *leastPriority = kPriorities - 1;
        *greatestPriority = 0;
    });
}

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
    return run_api(__func__, [&] {
        require(mode == ACL_CONTINUE_ON_FAILURE || mode == ACL_STOP_ON_FAILURE,
                "mode must be 0 or 1, got " + std::to_string(mode));
        stream_of(stream)->set_stop_on_failure(mode == ACL_STOP_ON_FAILURE);
        let_new_threads_wake_up_late();
    });
}

aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr stmAttrType, aclrtStreamAttrValue* value) {
    return run_api(__func__, [&] {
        require(value, "value");
        const auto target = stream_of(stream);
        if (stmAttrType == ACL_STREAM_ATTR_FAILURE_MODE) {
            target->set_stop_on_failure(value->failureMode == ACL_STOP_ON_FAILURE);
        } else if (stmAttrType != kStreamAttributeCacheOpInfo && stmAttrType != ACL_STREAM_ATTR_USER_CUSTOM_TAG) {
            throw Error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                        "the host NPU does not simulate stream attribute " + std::to_string(stmAttrType));
        }
    });
}

aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t flag) {
    // torch_npu enables this before every random number on chips without infinities, and never reads the result.
    const bool is_switched_on_by_torch_npu = soc() == Soc::Ascend910 || soc() == Soc::Ascend310P;
    if (flag != 0 && !is_switched_on_by_torch_npu) return unsupported(__func__, "overflow detection");
    return run_api(__func__, [] {});
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* flag) {
    return answer(__func__, flag, "flag", [&] {
        stream_of(stream);
        return 0;
    });
}

// The simulated device has no time-outs: the caller has to stop hung programs.
aclError aclrtSetOpWaitTimeout(uint32_t) {
    return run_api(__func__, [] {});
}

aclError aclrtSetOpExecuteTimeOut(uint32_t) {
    return run_api(__func__, [] {});
}

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actualTimeout) {
    return answer(__func__, actualTimeout, "actualTimeout", [&] { return timeout; });
}

aclError aclrtCmoAsync(void* src, size_t size, aclrtCmoType, aclrtStream stream) {
    return run_api(__func__, [&] {
        // A cache hint: only its arguments are validated.
        DeviceMemory::instance().alias(src, size);
        stream_of(stream);
    });
}

aclError aclrtValueWrite(void* devAddr, uint64_t value, uint32_t flag, aclrtStream stream) {
    return run_api(__func__, [&] {
        require(flag == 0, "flag must be 0, got " + std::to_string(flag));
        device_value(devAddr);
        stream_of(stream)->enqueue("aclrtValueWrite", [=] { device_value(devAddr).store(value); });
    });
}

aclError aclrtValueWait(void* devAddr, uint64_t value, uint32_t flag, aclrtStream stream) {
    return run_api(__func__, [&] {
        device_value(devAddr);
        // A rehearsal would wait forever: nothing else writes to its memory.
        stream_of(stream)->enqueue({.name = "aclrtValueWait",
                                    .work =
                                        [devAddr, holds = condition(value, flag)] {
                                            const auto current = device_value(devAddr);
                                            while (!holds(current.load())) std::this_thread::yield();
                                        },
                                    .captured = Captured::recorded});
    });
}

aclError aclrtDeviceTaskAbort(int32_t, uint32_t) { return unsupported(__func__, "the abortion of running work"); }

aclError aclrtStreamAbort(aclrtStream) { return unsupported(__func__, "the abortion of running work"); }
