#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// Puts `padding[2 i]` values before and `padding[2 i + 1]` after the elements of dimension -1 - i; negative numbers
// cut.
ACLNN_API aclnnStatus aclnnConstantPadNdGetWorkspaceSize(const aclTensor* self, const aclIntArray* padding,
                                                         const aclScalar* value, aclTensor* out,
                                                         std::uint64_t* workspaceSize, aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnConstantPadNd(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                         aclrtStream stream);
}
