// The two kernels of aclnnFusedLinearCrossEntropyLossGrad.
#pragma once

#include "nnopbase/call.h"

namespace host_npu::linear_cross_entropy_grad {

// The indices of the tensors.
enum : std::size_t {
    kGrad,
    kInput,
    kWeight,
    kTargetMask,
    kMaskedTarget,
    kLogitsMax,
    kSumExpLogits,
    kSoftmax,
    kInputGrad,
    kWeightGrad
};

// High-performance mode: overwrites the softmax.
void from_softmax(const KernelArguments& arguments);

// Memory-friendly mode: recomputes the logits tile by tile.
void from_statistics(const KernelArguments& arguments);

}  // namespace host_npu::linear_cross_entropy_grad
