// Device memory, page-locked host memory, and virtual addresses.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>

#include "ascendcl/acl_names.h"
#include "ascendcl/context.h"
#include "ascendcl/error.h"
#include "ascendcl/host_limits.h"
#include "ascendcl/host_memory.h"
#include "ascendcl/memory.h"
#include "ascendcl/settings.h"
#include "ascendcl/statistics.h"

using namespace host_npu;

namespace {

Handles<PhysicalMemory>& physical_memory() {
    static auto& all = *new Handles<PhysicalMemory>("physical memory");
    return all;
}

// The padding that the runtime adds to a requested size.
constexpr std::size_t kPadding = 32;

std::int32_t allocate(const char* function, void** pointer, size_t size, std::size_t padding = kPadding) {
    return run_api(function, [&] {
        require(pointer, "devPtr");
        *pointer = DeviceMemory::instance().allocate(current_device(), size, padding);
    });
}

}  // namespace

aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy) { return allocate(__func__, devPtr, size); }

aclError aclrtMallocAlign32(void** devPtr, size_t size, aclrtMemMallocPolicy) {
    return allocate(__func__, devPtr, size, 0);
}

aclError aclrtMallocCached(void** devPtr, size_t size, aclrtMemMallocPolicy) {
    return allocate(__func__, devPtr, size);
}

aclError aclrtMallocWithCfg(void** devPtr, size_t size, aclrtMemMallocPolicy, aclrtMallocConfig*) {
    return allocate(__func__, devPtr, size);
}

aclError aclrtFree(void* devPtr) {
    return run_api(__func__, [&] {
        require(devPtr, "devPtr");
        DeviceMemory::instance().release(devPtr);
    });
}

aclError aclrtFreeWithDevSync(void* devPtr) {
    return run_api(__func__, [&] {
        require(devPtr, "devPtr");
        const auto device = DeviceMemory::instance().device_of(devPtr);
        require(device.has_value(), "devPtr is not live device memory");
        synchronize_device(*device, std::nullopt);
        DeviceMemory::instance().release(devPtr);
    });
}

aclError aclrtMallocHost(void** hostPtr, size_t size) {
    return answer(__func__, hostPtr, "hostPtr", [&] { return HostMemory::instance().allocate(size); });
}

aclError aclrtMallocHostWithCfg(void** ptr, uint64_t size, aclrtMallocConfig*) {
    return answer(__func__, ptr, "ptr", [&] { return HostMemory::instance().allocate(size); });
}

aclError aclrtFreeHost(void* hostPtr) {
    return run_api(__func__, [&] {
        require(hostPtr, "hostPtr");
        HostMemory::instance().release(hostPtr);
    });
}

aclError aclrtHostRegisterV2(void* ptr, uint64_t size, uint32_t flag) {
    return run_api(__func__, [&] {
        require(ptr, "ptr");
        require(size > 0, "size is 0");
        require((flag & ~(ACL_HOST_REG_PINNED | ACL_HOST_REG_READONLY)) == 0,
                "the host NPU registers host memory to pin it only, not to map it");
        HostMemory::instance().add(ptr, size);
    });
}

extern "C" HOST_NPU_EXPORT aclError aclrtHostRegister(void*, uint64_t, aclrtHostRegisterType, void**) {
    return unsupported(__func__, "device addresses of host memory");
}

aclError aclrtHostUnregister(void* ptr) {
    return run_api(__func__, [&] {
        require(ptr, "ptr");
        HostMemory::instance().remove(ptr);
    });
}

aclError aclrtPointerGetAttributes(const void* ptr, aclrtPtrAttributes* attributes) {
    return run_api(__func__, [&] {
        require(ptr, "ptr");
        require(attributes, "attributes");
        *attributes = {};
        attributes->pageSize = static_cast<uint32_t>(page_bytes());
        if (const auto device = DeviceMemory::instance().device_of(ptr)) {
            attributes->location = {static_cast<uint32_t>(*device), ACL_MEM_LOCATION_TYPE_DEVICE};
        } else if (HostMemory::instance().contains(ptr)) {
            attributes->location = {0, ACL_MEM_LOCATION_TYPE_HOST};
        } else {
            attributes->location = {0, ACL_MEM_LOCATION_TYPE_UNREGISTERED};
        }
    });
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
    return run_api(__func__, [&] {
        require(free, "free");
        require(total, "total");
        *total = device_memory_bytes();
        // torch.npu.mem_get_info() may be a program's first call, which does not set the default device.
        const auto device = has_current_context() ? current_device() : 0;
        *free = *total - std::min(*total, device_bytes(device));
        if (!memory_is_set()) *free = std::min(*free, available_bytes());
    });
}

aclError aclrtGetMemUsageInfo(int32_t deviceId, aclrtMemUsageInfo* memUsageInfo, size_t inputNum, size_t* outputNum) {
    return run_api(__func__, [&] {
        require(memUsageInfo, "memUsageInfo");
        require(outputNum, "outputNum");
        require(inputNum > 0, "inputNum is 0");
        require_device(deviceId);
        constexpr std::string_view module = "APP";
        memUsageInfo[0] = {};
        std::copy(module.begin(), module.end(), memUsageInfo[0].name);
        memUsageInfo[0].curMemSize = device_bytes(deviceId);
        memUsageInfo[0].memPeakSize = peak_device_bytes(deviceId);
        *outputNum = 1;
    });
}

aclError aclrtReserveMemAddress(void** virPtr, size_t size, size_t alignment, void* expectPtr, uint64_t) {
    return answer(__func__, virPtr, "virPtr", [&] {
        require(expectPtr == nullptr, "expectPtr must be null");
        return DeviceMemory::instance().reserve(size, alignment);
    });
}

aclError aclrtReleaseMemAddress(void* virPtr) {
    return run_api(__func__, [&] { DeviceMemory::instance().unreserve(virPtr); });
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* prop, uint64_t) {
    return answer(__func__, handle, "handle", [&] {
        require(prop, "prop");
        require(size > 0, "size is 0");
        if (prop->location.type != ACL_MEM_LOCATION_TYPE_DEVICE) {
            throw Error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the host NPU has physical memory on devices only");
        }
        const auto device = static_cast<std::int32_t>(prop->location.id);
        require_device(device);
        return physical_memory().add(std::make_shared<PhysicalMemory>(device, size));
    });
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    return run_api(__func__, [&] { physical_memory().remove(handle); });
}

aclError aclrtMapMem(void* virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
    return run_api(__func__,
                   [&] { DeviceMemory::instance().map(virPtr, size, offset, physical_memory().get(handle)); });
}

aclError aclrtUnmapMem(void* virPtr) {
    return run_api(__func__, [&] { DeviceMemory::instance().unmap(virPtr); });
}

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp* prop, aclrtMemGranularityOptions, size_t* granularity) {
    return run_api(__func__, [&] {
        require(prop, "prop");
        require(granularity, "granularity");
        *granularity = std::size_t{2} << 20;
    });
}

aclError aclrtGetMemUceInfo(int32_t deviceId, aclrtMemUceInfo*, size_t, size_t* retSize) {
    return answer(__func__, retSize, "retSize", [&] {
        require_device(deviceId);
        return 0;
    });
}

#define REFUSE_TO_SHARE(function, ...) \
    HOST_NPU_EXPORT aclError function(__VA_ARGS__) { return not_shared(__func__, "device memory"); }

REFUSE_TO_SHARE(aclrtMemExportToShareableHandle, aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*)
REFUSE_TO_SHARE(aclrtMemImportFromShareableHandle, uint64_t, int32_t, aclrtDrvMemHandle*)
REFUSE_TO_SHARE(aclrtMemSetPidToShareableHandle, uint64_t, int32_t*, size_t)

extern "C" {
REFUSE_TO_SHARE(aclrtIpcMemGetExportKey, void*, size_t, char*, size_t, uint64_t)
REFUSE_TO_SHARE(aclrtIpcMemImportByKey, void**, const char*, uint64_t)
REFUSE_TO_SHARE(aclrtIpcMemClose, const char*)
REFUSE_TO_SHARE(aclrtIpcMemSetImportPid, const char*, int32_t*, size_t)
}

#undef REFUSE_TO_SHARE
