#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// Converts `self` to `dtype`, which is out's.
ACLNN_API aclnnStatus aclnnCastGetWorkspaceSize(const aclTensor* self, const aclDataType dtype, aclTensor* out,
                                                std::uint64_t* workspaceSize, aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnCast(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                aclrtStream stream);
}
