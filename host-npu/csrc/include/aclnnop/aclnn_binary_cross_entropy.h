#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// Binary cross entropy of probabilities: per element, its mean or its sum.
ACLNN_API aclnnStatus aclnnBinaryCrossEntropyGetWorkspaceSize(const aclTensor* self, const aclTensor* target,
                                                              const aclTensor* weight, std::int64_t reduction,
                                                              aclTensor* out, std::uint64_t* workspaceSize,
                                                              aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnBinaryCrossEntropy(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                              aclrtStream stream);
}
