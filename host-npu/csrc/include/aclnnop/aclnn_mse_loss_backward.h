#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// The gradient of the mean squared error, in the shape that the three inputs broadcast to.
ACLNN_API aclnnStatus aclnnMseLossBackwardGetWorkspaceSize(const aclTensor* gradOutput, const aclTensor* self,
                                                           const aclTensor* target, std::int64_t reduction,
                                                           aclTensor* out, std::uint64_t* workspaceSize,
                                                           aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnMseLossBackward(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                           aclrtStream stream);
}
