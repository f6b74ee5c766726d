#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// The rows of `weight` that `indices` names.
ACLNN_API aclnnStatus aclnnEmbeddingGetWorkspaceSize(const aclTensor* weight, const aclTensor* indices,
                                                     const aclTensor* out, std::uint64_t* workspaceSize,
                                                     aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnEmbedding(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                     const aclrtStream stream);
}
