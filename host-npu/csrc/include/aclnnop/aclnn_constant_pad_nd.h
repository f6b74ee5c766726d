#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// Copies `self` into `out`, with `value` around it: `pad` has the elements before and after the last dimension, then
// those of the dimension before it, and so on.
ACLNN_API aclnnStatus aclnnConstantPadNdGetWorkspaceSize(const aclTensor* self, const aclIntArray* pad,
                                                         const aclScalar* value, aclTensor* out,
                                                         std::uint64_t* workspaceSize, aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnConstantPadNd(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                         aclrtStream stream);
}
