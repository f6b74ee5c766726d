// Start and end of the library, and what torch_npu looks up by name in it.
#include <cstdint>

#include "aclnn/aclnn_base.h"
#include "nnopbase/status.h"

extern "C" {

// torch_npu brackets a call with these: CANN may draw the memory of a composed operator from a pool of the thread.
ACLNN_API int InitHugeMemThreadLocal(void*, bool) {
    return host_npu::unless_it_fails(__func__, [] { return host_npu::kSuccess; });
}
ACLNN_API void UnInitHugeMemThreadLocal(void*, bool) {}
ACLNN_API void ReleaseHugeMem(void*, bool) {}

// A second cache, for callers that hash their arguments before they make tensors of them. No operator takes part, which
// CANN says of some of its own; the callers then take the documented way through phase one.
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
