#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// A step of Adam on `varRef` and its moments, and of the exponential moving average `sRef` of the parameter.
ACLNN_API aclnnStatus aclnnApplyFusedEmaAdamGetWorkspaceSize(const aclTensor* grad, aclTensor* varRef, aclTensor* mRef,
                                                             aclTensor* vRef, aclTensor* sRef, const aclTensor* step,
                                                             double lr, double emaDecay, double beta1, double beta2,
                                                             double eps, std::int64_t mode, bool biasCorrection,
                                                             double weightDecay, std::uint64_t* workspaceSize,
                                                             aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnApplyFusedEmaAdam(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                             aclrtStream stream);
}
