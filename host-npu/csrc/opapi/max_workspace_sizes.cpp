// The workspaces of operators that a captured graph may be given other arguments for, which is refused.
#include <string>

#include "nnopbase/status.h"

namespace {

aclnnStatus refuse(const char* name) {
    const auto text = std::string(
                          "the host NPU does not simulate updates of captured graphs "
                          "(auto_dispatch_capture=True), for which torch_npu calls ") +
                      name;
    host_npu::report_error(host_npu::kFindKernelError, text);
    return host_npu::kFindKernelError;
}

}  // namespace

#define HOST_NPU_REFUSE(name) \
    extern "C" HOST_NPU_EXPORT aclnnStatus name() { return refuse(#name); }
HOST_NPU_REFUSE(aclnnFlashAttentionUnpaddingScoreGradV5GetMaxWorkspaceSize)
HOST_NPU_REFUSE(aclnnFlashAttentionVarLenScoreV5GetMaxWorkspaceSize)
HOST_NPU_REFUSE(aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize)
HOST_NPU_REFUSE(aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize)
HOST_NPU_REFUSE(aclnnFusedInferAttentionScoreV5GetMaxWorkspaceSize)
#undef HOST_NPU_REFUSE
