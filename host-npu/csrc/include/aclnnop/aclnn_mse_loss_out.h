#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// Squared error: per element, or its mean or sum over the first dimension.
ACLNN_API aclnnStatus aclnnMseLossOutGetWorkspaceSize(const aclTensor* self, const aclTensor* target,
                                                      std::int64_t reduction, aclTensor* out,
                                                      std::uint64_t* workspaceSize, aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnMseLossOut(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                      aclrtStream stream);
}
