// Initialization and finalization, and the functions that torch_npu looks up by name.
#include <cstdint>

#include "aclnn/aclnn_base.h"
#include "nnopbase/status.h"

extern "C" {

// torch_npu brackets calls with these, so that CANN can allocate memory of composed operators from a per-thread pool.
ACLNN_API int InitHugeMemThreadLocal(void*, bool) {
    return host_npu::unless_it_fails(__func__, [] { return host_npu::kSuccess; });
}
ACLNN_API void UnInitHugeMemThreadLocal(void*, bool) {}
ACLNN_API void ReleaseHugeMem(void*, bool) {}

// A second cache, for callers that hash their arguments before they create tensors. No operator uses it here, as some
// of CANN's do not; callers then fall back to the documented phase one.
ACLNN_API bool CanUsePTACache(const char*) { return false; }
ACLNN_API void InitPTACacheThreadLocal() {}
ACLNN_API void UnInitPTACacheThreadLocal() {}
ACLNN_API void SetPTAHashKey(std::uint64_t) {}
ACLNN_API void SetPTACacheHashKey(std::uint8_t*, std::size_t) {}
ACLNN_API aclOpExecutor* PTAGetExecCache(std::uint64_t, std::uint64_t*) { return nullptr; }
ACLNN_API aclOpExecutor* PTAFindExecCache(std::uint8_t*, std::size_t, std::uint64_t*) { return nullptr; }
ACLNN_API void AddTensorAddrToCachedList(void*) {}
}

aclnnStatus aclnnInit(const char*) {
    return host_npu::unless_it_fails(__func__, [] { return host_npu::kSuccess; });
}

aclnnStatus aclnnFinalize() {
    return host_npu::unless_it_fails(__func__, [] { return host_npu::kSuccess; });
}

aclnnStatus aclDumpOpTensors(const char* opType, const char* opName, aclTensor** tensors, std::size_t inputTensorNum,
                             std::size_t outputTensorNum, aclrtStream) {
    using namespace host_npu;
    return unless_it_fails(__func__, [=, function = __func__] {
        const bool none = inputTensorNum + outputTensorNum == 0;
        if (opType == nullptr || opName == nullptr || (tensors == nullptr && !none)) {
            return failed(kNullPointer, function, "an argument is a null pointer");
        }
        return kSuccess;
    });
}
