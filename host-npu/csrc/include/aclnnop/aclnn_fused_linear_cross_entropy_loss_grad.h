#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// The gradients of linear cross entropy. A given softmax is destroyed; without one, the logits are computed again.
ACLNN_API aclnnStatus aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
    const aclTensor* grad, const aclTensor* input, const aclTensor* weight, const aclTensor* targetMask,
    const aclTensor* maskedTarget, float labelSmoothing, const aclTensor* logitsMaxOptional,
    const aclTensor* sumExpLogitsOptional, const aclTensor* softmaxOptional, aclTensor* inputGradOut,
    aclTensor* weightGradOut, std::uint64_t* workspaceSize, aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnFusedLinearCrossEntropyLossGrad(void* workspace, std::uint64_t workspaceSize,
                                                           aclOpExecutor* executor, aclrtStream stream);
}
