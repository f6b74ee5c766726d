#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// The gradient of binary cross entropy with respect to the probabilities.
ACLNN_API aclnnStatus aclnnBinaryCrossEntropyBackwardGetWorkspaceSize(
    const aclTensor* gradOutput, const aclTensor* self, const aclTensor* target, const aclTensor* weightOptional,
    std::int64_t reduction, aclTensor* out, std::uint64_t* workspaceSize, aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnBinaryCrossEntropyBackward(void* workspace, std::uint64_t workspaceSize,
                                                      aclOpExecutor* executor, const aclrtStream stream);
}
