// libhccl: communication between devices, which the host NPU does not simulate.
#include "hccl/hccl.h"

#include <array>
#include <atomic>
#include <string>

#include "acl/acl_base.h"
#include "ascendcl/device.h"

namespace {

// torch_npu sets options before there is any communicator; nothing reads them but torch_npu.
std::array<std::atomic<int32_t>, HCCL_CONFIG_RESERVED> configuration{};

// Runs the body of an exported function, or returns the failure that a test asked for in this call.
template <typename Body>
HcclResult unless_it_fails(const char* function, const Body& body) {
    if (const auto failure = host_npu::injected_failure(function)) {
        host_npu::report_error(failure->first, std::string(function) + ": " + failure->second);
        return static_cast<HcclResult>(failure->first);
    }
    return body();
}

HcclResult refuse(const char* function) {
    return unless_it_fails(function, [function] {
        host_npu::report_error(
            ACL_ERROR_FEATURE_UNSUPPORTED,
            std::string(function) + ": the host NPU does not simulate communication between devices");
        return HCCL_E_NOT_SUPPORT;
    });
}

}  // namespace

HOST_NPU_EXPORT HcclResult HcclSetConfig(HcclConfig config, HcclConfigValue configValue) {
    return unless_it_fails(__func__, [&] {
        if (config < 0 || config >= HCCL_CONFIG_RESERVED) return HCCL_E_PARA;
        configuration[config] = configValue.value;
        return HCCL_SUCCESS;
    });
}

HOST_NPU_EXPORT HcclResult HcclGetConfig(HcclConfig config, HcclConfigValue* configValue) {
    return unless_it_fails(__func__, [&] {
        if (config < 0 || config >= HCCL_CONFIG_RESERVED) return HCCL_E_PARA;
        if (configValue == nullptr) return HCCL_E_PTR;
        configValue->value = configuration[config];
        return HCCL_SUCCESS;
    });
}

HOST_NPU_EXPORT HcclResult HcclGetRootInfo(HcclRootInfo*) { return refuse(__func__); }

HOST_NPU_EXPORT HcclResult HcclCommInitRootInfo(uint32_t, const HcclRootInfo*, uint32_t, HcclComm*) {
    return refuse(__func__);
}

HOST_NPU_EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t, const HcclRootInfo*, uint32_t, const HcclCommConfig*,
                                                      HcclComm*) {
    return refuse(__func__);
}

HOST_NPU_EXPORT HcclResult HcclCommInitAll(uint32_t, int32_t*, HcclComm*) { return refuse(__func__); }
