// Device binaries, whose instruction set is not simulated. torch_npu's library links against some of these functions;
// all return "not supported".
#include "ascendcl/acl_names.h"
#include "ascendcl/error.h"

using namespace host_npu;

#define REFUSE(function, ...) \
    HOST_NPU_EXPORT std::int32_t function(__VA_ARGS__) { return unsupported(__func__, "kernels in device code"); }

REFUSE(aclrtBinaryLoadFromData, const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*)
REFUSE(aclrtBinaryGetFunction, const aclrtBinHandle, const char*, aclrtFuncHandle*)
REFUSE(aclrtGetFunctionAddr, aclrtFuncHandle, void**, void**)
REFUSE(aclrtLaunchKernelWithHostArgs, aclrtFuncHandle, uint32_t, aclrtStream, aclrtLaunchKernelCfg*, void*, size_t,
       aclrtPlaceHolderInfo*, size_t)
REFUSE(aclrtGetHardwareSyncAddr, void**)

// The runtime's older interface has no public header; its arguments are ignored.
extern "C" {
REFUSE(rtDevBinaryRegister, const void*, void**)
REFUSE(rtFunctionRegister, void*, const void*, const char*, const void*, std::uint32_t)
REFUSE(rtKernelLaunch, const void*, std::uint32_t, void*, std::uint32_t, void*, void*)
REFUSE(rtGetC2cCtrlAddr, std::uint64_t*, std::uint32_t*)
}

#undef REFUSE
