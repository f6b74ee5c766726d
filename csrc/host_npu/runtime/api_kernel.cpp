// Device binaries and graphs, which need an instruction set or a graph engine that is not simulated. torch_npu's library
// is linked against some of these; all answer that they are not supported.
#include "acl/acl.h"
#include "error.h"

using namespace host_npu;

namespace {

constexpr const char* kBinaries = "kernels in device code";
constexpr const char* kGraphs = "captured graphs";

}  // namespace

aclError aclrtBinaryLoadFromData(const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*) {
    return unsupported(__func__, kBinaries);
}

aclError aclrtBinaryGetFunction(const aclrtBinHandle, const char*, aclrtFuncHandle*) {
    return unsupported(__func__, kBinaries);
}

aclError aclrtGetFunctionAddr(aclrtFuncHandle, void**, void**) { return unsupported(__func__, kBinaries); }

aclError aclrtLaunchKernelWithHostArgs(aclrtFuncHandle, uint32_t, aclrtStream, aclrtLaunchKernelCfg*, void*, size_t,
                                       aclrtPlaceHolderInfo*, size_t) {
    return unsupported(__func__, kBinaries);
}

aclError aclrtGetHardwareSyncAddr(void**) { return unsupported(__func__, kBinaries); }

// The runtime's older interface has no public header; its arguments are not looked at.
extern "C" {

HOST_NPU_EXPORT std::int32_t rtDevBinaryRegister(const void*, void**) { return unsupported(__func__, kBinaries); }

HOST_NPU_EXPORT std::int32_t rtFunctionRegister(void*, const void*, const char*, const void*, std::uint32_t) {
    return unsupported(__func__, kBinaries);
}

HOST_NPU_EXPORT std::int32_t rtKernelLaunch(const void*, std::uint32_t, void*, std::uint32_t, void*, void*) {
    return unsupported(__func__, kBinaries);
}

HOST_NPU_EXPORT std::int32_t rtGetC2cCtrlAddr(std::uint64_t*, std::uint32_t*) {
    return unsupported(__func__, kBinaries);
}

}  // extern "C"

aclError aclmdlRICaptureBegin(aclrtStream, aclmdlRICaptureMode) { return unsupported(__func__, kGraphs); }

aclError aclmdlRICaptureEnd(aclrtStream, aclmdlRI*) { return unsupported(__func__, kGraphs); }

aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus* status, aclmdlRI* modelRI) {
    return run_api(__func__, [&] {
        require(status, "status");
        *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
        if (modelRI != nullptr) *modelRI = nullptr;
    });
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
    return run_api(__func__, [&] {
        require(mode, "mode");
        thread_local auto mode_of_thread = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
        std::swap(*mode, mode_of_thread);
    });
}

aclError aclmdlRIExecuteAsync(aclmdlRI, aclrtStream) { return unsupported(__func__, kGraphs); }

aclError aclmdlRIDestroy(aclmdlRI) { return unsupported(__func__, kGraphs); }

aclError aclmdlRIDebugJsonPrint(aclmdlRI, const char*, uint32_t) { return unsupported(__func__, kGraphs); }

aclError aclmdlRIGetId(aclmdlRI, uint32_t*) { return unsupported(__func__, kGraphs); }

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream) { return unsupported(__func__, kGraphs); }

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream, aclrtTaskGrp*) { return unsupported(__func__, kGraphs); }

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream, aclrtTaskGrp) { return unsupported(__func__, kGraphs); }

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream) { return unsupported(__func__, kGraphs); }
