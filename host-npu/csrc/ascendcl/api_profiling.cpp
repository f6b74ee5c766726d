// The interface through which torch_npu reports to CANN's profiler. Registering and reporting succeed without effect,
// as in CANN while no profiler runs; starting a profiler is refused.
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string_view>

#include "ascendcl/error.h"

// Not every torch_npu has the header of these functions. Structure arguments are ignored.
extern "C" {

HOST_NPU_EXPORT std::int32_t MsprofRegisterCallback(std::uint32_t, const void*) { return 0; }

HOST_NPU_EXPORT std::int32_t MsprofReportApi(std::uint32_t, const void*) { return 0; }

HOST_NPU_EXPORT std::int32_t MsprofReportCompactInfo(std::uint32_t, const void*, std::uint32_t) { return 0; }

HOST_NPU_EXPORT std::int32_t MsprofReportAdditionalInfo(std::uint32_t, const void*, std::uint32_t) { return 0; }

HOST_NPU_EXPORT std::uint64_t MsprofGetHashId(const char* hashInfo, std::size_t length) {
    return std::hash<std::string_view>{}({hashInfo, length});
}

HOST_NPU_EXPORT std::uint64_t MsprofSysCycleTime() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// Throws, because torch_npu ignores the status.
HOST_NPU_EXPORT std::int32_t aclprofInit(const char*, std::size_t) {
    throw std::runtime_error("the host NPU does not simulate the profiler of NPUs: use torch.profiler");
}

HOST_NPU_EXPORT std::int32_t aclprofFinalize() { return 0; }

}  // extern "C"
