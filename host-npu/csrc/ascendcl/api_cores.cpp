// Limits on the number of cores.
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "acl/acl.h"
#include "ascendcl/context.h"
#include "ascendcl/error.h"
#include "ascendcl/settings.h"

using namespace host_npu;

namespace {

// The core limits of streams, devices and threads. They do not affect the simulated kernels, which run on the host.
class CoreLimits {
  public:
    std::uint32_t get(const void* owner, aclrtDevResLimitType type) const {
        const auto all = available(type);
        const std::lock_guard lock(mutex_);
        const auto found = limits_.find({owner, type});
        return found == limits_.end() ? all : found->second;
    }

    void set(const void* owner, aclrtDevResLimitType type, std::uint32_t value) {
        require(value > 0 && value <= available(type), "value must be from 1 to the device's " +
                                                           std::to_string(available(type)) + " cores, got " +
                                                           std::to_string(value));
        const std::lock_guard lock(mutex_);
        limits_[{owner, type}] = value;
    }

    void reset(const void* owner) {
        const std::lock_guard lock(mutex_);
        std::erase_if(limits_, [&](const auto& entry) { return entry.first.first == owner; });
    }

  private:
    static std::uint32_t available(aclrtDevResLimitType type) {
        if (type == ACL_RT_DEV_RES_CUBE_CORE) return core_counts().cube;
        if (type == ACL_RT_DEV_RES_VECTOR_CORE) return core_counts().vector;
        throw Error(ACL_ERROR_RT_PARAM_INVALID, "there is no resource " + std::to_string(type));
    }

    mutable std::mutex mutex_;
    std::map<std::pair<const void*, int>, std::uint32_t> limits_;
};

CoreLimits& core_limits() {
    static auto& limits = *new CoreLimits;
    return limits;
}

// A unique address that identifies a device as the owner of limits.
const void* limit_owner(std::int32_t device) {
    require_device(device);
    static const std::array<char, 64> owners{};
    return &owners.at(device);
}

thread_local const void* limit_owner_of_thread = nullptr;

}  // namespace

aclError aclrtGetDeviceResLimit(int32_t deviceId, aclrtDevResLimitType type, uint32_t* value) {
    return answer(__func__, value, "value", [&] { return core_limits().get(limit_owner(deviceId), type); });
}

aclError aclrtSetDeviceResLimit(int32_t deviceId, aclrtDevResLimitType type, uint32_t value) {
    return run_api(__func__, [&] { core_limits().set(limit_owner(deviceId), type, value); });
}

aclError aclrtResetDeviceResLimit(int32_t deviceId) {
    return run_api(__func__, [&] { core_limits().reset(limit_owner(deviceId)); });
}

aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t* value) {
    return answer(__func__, value, "value", [&] { return core_limits().get(stream_of(stream).get(), type); });
}

aclError aclrtSetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t value) {
    return run_api(__func__, [&] { core_limits().set(stream_of(stream).get(), type, value); });
}

aclError aclrtResetStreamResLimit(aclrtStream stream) {
    return run_api(__func__, [&] { core_limits().reset(stream_of(stream).get()); });
}

aclError aclrtUseStreamResInCurrentThread(aclrtStream stream) {
    return run_api(__func__, [&] { limit_owner_of_thread = stream_of(stream).get(); });
}

aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) {
    return run_api(__func__, [] { limit_owner_of_thread = nullptr; });
}

aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
    return answer(__func__, value, "value", [&] {
        const auto* const owner = limit_owner_of_thread;
        return core_limits().get(owner == nullptr ? limit_owner(current_device()) : owner, type);
    });
}
