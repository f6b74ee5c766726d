// libhccl: communication between devices, which the host NPU does not simulate.
#include "hccl/hccl.h"

#include <string>

#include "acl/acl_base.h"
#include "device.h"

namespace {

HcclResult refuse(const char* function) {
    host_npu::report_error(ACL_ERROR_FEATURE_UNSUPPORTED,
                           std::string(function) + ": the host NPU does not simulate communication between devices");
    return HCCL_E_NOT_SUPPORT;
}

}  // namespace

HOST_NPU_EXPORT HcclResult HcclGetRootInfo(HcclRootInfo*) { return refuse(__func__); }

HOST_NPU_EXPORT HcclResult HcclCommInitRootInfo(uint32_t, const HcclRootInfo*, uint32_t, HcclComm*) {
    return refuse(__func__);
}

HOST_NPU_EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t, const HcclRootInfo*, uint32_t, const HcclCommConfig*,
                                                      HcclComm*) {
    return refuse(__func__);
}

HOST_NPU_EXPORT HcclResult HcclCommInitAll(uint32_t, int32_t*, HcclComm*) { return refuse(__func__); }
