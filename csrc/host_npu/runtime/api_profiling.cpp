// The interface through which torch_npu tells CANN's profiler what it does. Nothing collects here, so registering and
// reporting succeed without an effect, as they do in CANN while no profiler runs.
#include <chrono>
#include <functional>
#include <string_view>

#include "profiling/aprof_pub.h"

int32_t MsprofRegisterCallback(uint32_t, ProfCommandHandle) { return 0; }

int32_t MsprofReportApi(uint32_t, const MsprofApi*) { return 0; }

int32_t MsprofReportCompactInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }

int32_t MsprofReportAdditionalInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }

uint64_t MsprofGetHashId(const char* hashInfo, size_t length) {
    return std::hash<std::string_view>{}({hashInfo, length});
}

uint64_t MsprofSysCycleTime() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
