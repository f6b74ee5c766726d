// Functions that are not simulated: device networks, memory shared by devices, and recovery.
#include "hccl/api.h"
#include "hccl/hccl.h"

using namespace host_npu::hccl;

HOST_NPU_EXPORT HcclResult HcclCommInitClusterInfo(const char*, uint32_t, HcclComm*) {
    return unsupported(__func__, "rank tables: use HcclGetRootInfo and HcclCommInitRootInfo");
}

HOST_NPU_EXPORT HcclResult HcclCommInitClusterInfoConfig(const char*, uint32_t, HcclCommConfig*, HcclComm*) {
    return unsupported(__func__, "rank tables: use HcclGetRootInfo and HcclCommInitRootInfo");
}

HOST_NPU_EXPORT HcclResult HcclCommSuspend(HcclComm) { return unsupported(__func__, "the recovery of communicators"); }

HOST_NPU_EXPORT HcclResult HcclCommResume(HcclComm) { return unsupported(__func__, "the recovery of communicators"); }

HOST_NPU_EXPORT HcclResult HcclSetCommConfig(HcclComm, HcclConfig, HcclConfigValue) {
    return unsupported(__func__, "settings of one communicator");
}

HOST_NPU_EXPORT HcclResult HcclGetCommConfig(HcclComm, HcclConfig, HcclConfigValue*) {
    return unsupported(__func__, "settings of one communicator");
}

HOST_NPU_EXPORT HcclResult HcclCommSetMemoryRange(HcclComm, void*, size_t, size_t, uint64_t) {
    return unsupported(__func__, "memory that communicators know beforehand");
}

HOST_NPU_EXPORT HcclResult HcclCommUnsetMemoryRange(HcclComm, void*) {
    return unsupported(__func__, "memory that communicators know beforehand");
}

HOST_NPU_EXPORT HcclResult HcclCommActivateCommMemory(HcclComm, void*, size_t, size_t, aclrtDrvMemHandle, uint64_t) {
    return unsupported(__func__, "memory that communicators know beforehand");
}

HOST_NPU_EXPORT HcclResult HcclCommDeactivateCommMemory(HcclComm, void*) {
    return unsupported(__func__, "memory that communicators know beforehand");
}

HOST_NPU_EXPORT HcclResult HcclCommWorkingDevNicSet(HcclComm, uint32_t*, bool*, uint32_t) {
    return unsupported(__func__, "network cards");
}

HOST_NPU_EXPORT HcclResult HcclCommRegister(HcclComm, void*, uint64_t, void**, uint32_t) {
    return unsupported(__func__, "windows of memory that ranks share");
}

HOST_NPU_EXPORT HcclResult HcclCommDeregister(HcclComm, void*) {
    return unsupported(__func__, "windows of memory that ranks share");
}

HOST_NPU_EXPORT HcclResult HcclCommExchangeMem(HcclComm, void*, uint32_t*, uint32_t) {
    return unsupported(__func__, "windows of memory that ranks share");
}

// The wheel's header does not declare these two.
extern "C" {

HOST_NPU_EXPORT HcclResult HcclCommSymWinRegister(HcclComm, void*, uint64_t, void**, uint32_t) {
    return unsupported(__func__, "windows of memory that ranks share");
}

HOST_NPU_EXPORT HcclResult HcclCommSymWinDeregister(void*) {
    return unsupported(__func__, "windows of memory that ranks share");
}

}  // extern "C"
