#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// Copies `src`, broadcast and cast, into `selfRef`.
ACLNN_API aclnnStatus aclnnInplaceCopyGetWorkspaceSize(aclTensor* selfRef, const aclTensor* src,
                                                       std::uint64_t* workspaceSize, aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnInplaceCopy(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                       aclrtStream stream);
}
