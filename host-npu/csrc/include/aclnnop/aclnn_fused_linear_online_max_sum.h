#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// Of logits = input x weight^T, per row: the maximum, the sum of exponentials, the target's logit, and whether the
// target is in this shard [vocabStartIndex, vocabEndIndex) of the vocabulary.
ACLNN_API aclnnStatus aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(
    const aclTensor* input, const aclTensor* weight, const aclTensor* target, std::int64_t vocabStartIndex,
    std::int64_t vocabEndIndex, aclTensor* logitsMaxLocalOut, aclTensor* sumExpLogitsLocalOut,
    aclTensor* predictedLogitsLocalOut, aclTensor* targetMaskOut, aclTensor* maskedTargetOut,
    aclTensor* vocabParallelLogitsOutOptional, std::uint64_t* workspaceSize, aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnFusedLinearOnlineMaxSum(void* workspace, std::uint64_t workspaceSize,
                                                   aclOpExecutor* executor, aclrtStream stream);
}
