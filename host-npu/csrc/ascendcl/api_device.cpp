// Devices and contexts.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "acl/acl.h"
#include "ascendcl/context.h"
#include "ascendcl/device.h"
#include "ascendcl/error.h"
#include "ascendcl/queue.h"
#include "ascendcl/settings.h"

using namespace host_npu;

namespace {

std::atomic<aclrtFloatOverflowMode> overflow_mode{ACL_RT_OVERFLOW_MODE_INFNAN};

}  // namespace

aclError aclrtGetDeviceCount(uint32_t* count) {
    return answer(__func__, count, "count", [&] { return static_cast<std::uint32_t>(device_count()); });
}

aclError aclrtGetDeviceUtilizationRate(int32_t deviceId, aclrtUtilizationInfo* utilizationInfo) {
    return run_api(__func__, [&] {
        require(utilizationInfo, "utilizationInfo");
        require_device(deviceId);
        const auto all = streams().all();
        const bool is_busy = std::any_of(all.begin(), all.end(), [deviceId](const auto& stream) {
            return stream->device() == deviceId && !stream->is_idle();
        });
        // Utilization over time is not measured: a device is either busy now or idle.
        const std::int32_t rate = is_busy ? 100 : 0;
        *utilizationInfo = {rate, rate, 0, 0, nullptr};
    });
}

aclError aclrtSetDevice(int32_t deviceId) {
    return run_api(__func__, [&] { set_current_device(deviceId); });
}

aclError aclrtGetDevice(int32_t* deviceId) {
    // Callers probe with this function, so the error is not reported.
    if (!has_current_context()) return ACL_ERROR_RT_CONTEXT_NULL;
    return answer(__func__, deviceId, "deviceId", [&] { return current_device(); });
}

aclError aclrtResetDevice(int32_t deviceId) {
    return run_api(__func__, [&] { reset_device(deviceId); });
}

aclError aclrtResetDeviceForce(int32_t deviceId) {
    return run_api(__func__, [&] { reset_device(deviceId); });
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    return run_api(__func__, [&] {
        require_queue();
        synchronize_device(current_device(), timeout_from(timeout));
    });
}

aclError aclrtSynchronizeDevice() {
    return run_api(__func__, [] {
        require_queue();
        synchronize_device(current_device(), std::nullopt);
    });
}

aclError aclrtGetRunMode(aclrtRunMode* runMode) {
    return answer(__func__, runMode, "runMode", [&] { return ACL_HOST; });
}

aclError aclrtCreateContext(aclrtContext* context, int32_t deviceId) {
    return run_api(__func__, [&] {
        require(context, "context");
        require_device(deviceId);
        auto created = std::make_shared<Context>(deviceId);
        *context = contexts().add(created);
        set_current_context(std::move(created));
    });
}

aclError aclrtDestroyContext(aclrtContext context) {
    return run_api(__func__, [&] { contexts().remove(context); });
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    return run_api(__func__, [&] { set_current_context(contexts().get(context)); });
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
    if (!has_current_context()) return ACL_ERROR_RT_CONTEXT_NULL;
    return answer(__func__, context, "context", [&] { return current_context().get(); });
}

// torch_npu 2.9 calls it, but its headers do not declare it.
extern "C" HOST_NPU_EXPORT aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t* flags, int32_t* active) {
    return run_api(__func__, [&] {
        require(active, "active");
        *active = has_primary_context(deviceId);
        if (flags != nullptr) *flags = 0;
    });
}

aclError aclrtCtxGetCurrentDefaultStream(aclrtStream* stream) {
    return answer(__func__, stream, "stream", [&] { return current_context()->default_stream().get(); });
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t* const logicDevId) {
    return answer(__func__, logicDevId, "logicDevId", [&] {
        require_device(userDevid);
        return userDevid;
    });
}

aclError aclrtDeviceCanAccessPeer(int32_t* canAccessPeer, int32_t deviceId, int32_t peerDeviceId) {
    return answer(__func__, canAccessPeer, "canAccessPeer", [&] {
        require_device(deviceId);
        require_device(peerDeviceId);
        return deviceId != peerDeviceId;
    });
}

aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags) {
    return run_api(__func__, [&] {
        require_device(peerDeviceId);
        require(flags == 0, "flags must be 0, got " + std::to_string(flags));
        require(peerDeviceId != current_device(), "a device is not its own peer");
    });
}

aclError aclrtDeviceDisablePeerAccess(int32_t peerDeviceId) {
    return run_api(__func__, [&] { require_device(peerDeviceId); });
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
    return answer(__func__, pid, "pid", [&] { return getpid(); });
}

aclError aclrtDeviceGetUuid(int32_t deviceId, aclrtUuid* uuid) {
    return run_api(__func__, [&] {
        require(uuid, "uuid");
        require_device(deviceId);
        *uuid = {};
        std::memcpy(uuid->bytes, "host NPU", 8);
        uuid->bytes[15] = static_cast<char>(deviceId);
    });
}

aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t* value) {
    return run_api(__func__, [&] {
        require(value, "value");
        require_device(static_cast<std::int32_t>(deviceId));
        switch (attr) {
            case ACL_DEV_ATTR_AICORE_CORE_NUM:
            case ACL_DEV_ATTR_CUBE_CORE_NUM:
                *value = core_counts().cube;
                return;
            case ACL_DEV_ATTR_VECTOR_CORE_NUM:
                *value = core_counts().vector;
                return;
            case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
                *value = static_cast<std::int64_t>(device_memory_bytes());
                return;
            case ACL_DEV_ATTR_IS_VIRTUAL:
                *value = 0;
                return;
            case ACL_DEV_ATTR_PHY_CHIP_ID:
                *value = deviceId;
                return;
            default:
                throw Error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                            "the host NPU does not simulate device attribute " + std::to_string(attr));
        }
    });
}

aclError aclGetDeviceCapability(uint32_t deviceId, aclDeviceInfo deviceInfo, int64_t* value) {
    return run_api(__func__, [&] {
        require(value, "value");
        require_device(static_cast<std::int32_t>(deviceId));
        switch (deviceInfo) {
            case ACL_DEVICE_INFO_AI_CORE_NUM:
                *value = core_counts().cube;
                return;
            case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
                *value = core_counts().vector;
                return;
            case ACL_DEVICE_INFO_L2_SIZE:
                *value = std::int64_t{192} << 20;
                return;
            default:
                throw Error(ACL_ERROR_RT_PARAM_INVALID, "there is no capability " + std::to_string(deviceInfo));
        }
    });
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    return run_api(__func__, [&] {
        require(mode == ACL_RT_OVERFLOW_MODE_SATURATION || mode == ACL_RT_OVERFLOW_MODE_INFNAN,
                "mode must be 0 or 1, got " + std::to_string(mode));
        // torch_npu enables saturation on chips without infinities; it changes no results here.
        const bool is_older = soc() == Soc::Ascend910 || soc() == Soc::Ascend310P;
        if (mode == ACL_RT_OVERFLOW_MODE_SATURATION && !is_older) {
            throw Error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the host NPU computes with infinities and NaN only");
        }
        overflow_mode = mode;
    });
}

aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
    return answer(__func__, mode, "mode", [&] { return overflow_mode.load(); });
}
