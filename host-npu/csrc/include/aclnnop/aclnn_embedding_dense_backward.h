#pragma once

#include "aclnn/acl_meta.h"

extern "C" {

// The gradient of an embedding's weight; the row `paddingIdx` stays zero.
ACLNN_API aclnnStatus aclnnEmbeddingDenseBackwardGetWorkspaceSize(const aclTensor* grad, const aclTensor* indices,
                                                                  std::uint64_t numWeights, std::uint64_t paddingIdx,
                                                                  bool scaleGradByFreq, const aclTensor* out,
                                                                  std::uint64_t* workspaceSize,
                                                                  aclOpExecutor** executor);
ACLNN_API aclnnStatus aclnnEmbeddingDenseBackward(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor,
                                                  const aclrtStream stream);
}
