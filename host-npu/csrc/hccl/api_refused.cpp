// Functions that are not simulated: device networks, memory shared by devices, and recovery.
#include "hccl/api.h"
#include "hccl/hccl.h"

using namespace host_npu::hccl;

namespace {

constexpr const char* kRankTables = "rank tables: use HcclGetRootInfo and HcclCommInitRootInfo";
constexpr const char* kRecovery = "the recovery of communicators";
constexpr const char* kSettings = "settings of one communicator";
constexpr const char* kKnownMemory = "memory that communicators know beforehand";
constexpr const char* kWindows = "windows of memory that ranks share";

}  // namespace

// Defines a refused function: its name, the missing feature, and its parameters.
#define REFUSE(function, what, ...) \
    HOST_NPU_EXPORT HcclResult function(__VA_ARGS__) { return unsupported(__func__, what); }

REFUSE(HcclCommInitClusterInfo, kRankTables, const char*, uint32_t, HcclComm*)
REFUSE(HcclCommInitClusterInfoConfig, kRankTables, const char*, uint32_t, HcclCommConfig*, HcclComm*)
REFUSE(HcclCommSuspend, kRecovery, HcclComm)
REFUSE(HcclCommResume, kRecovery, HcclComm)
REFUSE(HcclSetCommConfig, kSettings, HcclComm, HcclConfig, HcclConfigValue)
REFUSE(HcclGetCommConfig, kSettings, HcclComm, HcclConfig, HcclConfigValue*)
REFUSE(HcclCommSetMemoryRange, kKnownMemory, HcclComm, void*, size_t, size_t, uint64_t)
REFUSE(HcclCommUnsetMemoryRange, kKnownMemory, HcclComm, void*)
REFUSE(HcclCommActivateCommMemory, kKnownMemory, HcclComm, void*, size_t, size_t, aclrtDrvMemHandle, uint64_t)
REFUSE(HcclCommDeactivateCommMemory, kKnownMemory, HcclComm, void*)
REFUSE(HcclCommWorkingDevNicSet, "network cards", HcclComm, uint32_t*, bool*, uint32_t)
REFUSE(HcclCommRegister, kWindows, HcclComm, void*, uint64_t, void**, uint32_t)
REFUSE(HcclCommDeregister, kWindows, HcclComm, void*)
REFUSE(HcclCommExchangeMem, kWindows, HcclComm, void*, uint32_t*, uint32_t)

// Not declared in the wheel's header.
extern "C" {
REFUSE(HcclCommSymWinRegister, kWindows, HcclComm, void*, uint64_t, void**, uint32_t)
REFUSE(HcclCommSymWinDeregister, kWindows, void*)
}

#undef REFUSE
