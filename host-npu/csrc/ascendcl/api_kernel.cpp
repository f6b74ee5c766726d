// Device binaries, which need an instruction set that is not simulated. torch_npu's library is linked against some of
// these; all return that they are not supported.
#include "ascendcl/acl_names.h"
#include "ascendcl/error.h"

using namespace host_npu;

namespace {

constexpr const char* kBinaries = "kernels in device code";

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
