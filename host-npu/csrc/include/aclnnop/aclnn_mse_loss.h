#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// Mean squared error: per element, its mean or its sum.
ACLNN_API aclnnStatus aclnnMseLossGetWorkspaceSize(const aclTensor* self, const aclTensor* target,
                                                   std::int64_t reduction, aclTensor* out, std::uint64_t* workspaceSize,
                                                   aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnMseLoss(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                   aclrtStream stream);
}
