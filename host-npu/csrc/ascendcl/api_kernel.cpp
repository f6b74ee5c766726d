// Device binaries and graphs, which need an instruction set or a graph engine that is not simulated. torch_npu's
// library is linked against some of these; all return that they are not supported.
#include "ascendcl/acl_names.h"
#include "ascendcl/error.h"

using namespace host_npu;

namespace {

constexpr const char* kBinaries = "kernels in device code";
// With a status of its own: torch_npu only warns at ACL_ERROR_RT_FEATURE_NOT_SUPPORT here, and then fails an assertion.
aclError refuse_graph(const char* function) {
    return failed(function, ACL_ERROR_FEATURE_UNSUPPORTED, "the host NPU does not simulate captured graphs");
}

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

// The runtime's older interface has no public header; its arguments are ignored.
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

aclError aclmdlRICaptureBegin(aclrtStream, aclmdlRICaptureMode) { return refuse_graph(__func__); }

aclError aclmdlRICaptureEnd(aclrtStream, aclmdlRI*) { return refuse_graph(__func__); }

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

aclError aclmdlRIExecuteAsync(aclmdlRI, aclrtStream) { return refuse_graph(__func__); }

aclError aclmdlRIDestroy(aclmdlRI) { return refuse_graph(__func__); }

aclError aclmdlRIDebugJsonPrint(aclmdlRI, const char*, uint32_t) { return refuse_graph(__func__); }

aclError aclmdlRIGetId(aclmdlRI, uint32_t*) { return refuse_graph(__func__); }

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream) { return refuse_graph(__func__); }

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream, aclrtTaskGrp*) { return refuse_graph(__func__); }

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream, aclrtTaskGrp) { return refuse_graph(__func__); }

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream) { return refuse_graph(__func__); }
