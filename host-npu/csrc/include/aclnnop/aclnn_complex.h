#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// Puts `real`, `imag`, broadcast, into the parts of `out`.
ACLNN_API aclnnStatus aclnnComplexGetWorkspaceSize(const aclTensor* real, const aclTensor* imag, aclTensor* out,
                                                   std::uint64_t* workspaceSize, aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnComplex(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                   aclrtStream stream);
}
