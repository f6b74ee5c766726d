// A valid call of each operator, for tests to modify. The values are those of the documents' examples.
#pragma once

#include <limits>

#include "operators.h"  // of aclnnop, which tests/_c_program.py writes
#include "tests/device.h"

namespace test {

using PhaseTwo = aclnnStatus (*)(void*, std::uint64_t, aclOpExecutor*, aclrtStream);

struct MseLoss {
    Tensor self = floats({2, 2}, {0, 1, 2, 3}), target = floats({2, 2}, {1}), out = floats({});
    std::int64_t reduction = 1;

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnMseLossGetWorkspaceSize(self, target, reduction, out, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnMseLoss;
};

// Reduces to rows, not to a scalar.
struct MseLossOut {
    Tensor self = floats({2, 2}, {0, 1, 2, 3}), target = floats({2, 2}, {1}), out = floats({2});
    std::int64_t reduction = 1;

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnMseLossOutGetWorkspaceSize(self, target, reduction, out, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnMseLossOut;
};

struct MseLossBackward {
    Tensor grad = floats({2, 2}, {0, 1, 2, 3}), self = floats({2, 2}, {0, 1, 2, 3}), target = floats({2, 2}, {1});
    Tensor out = floats({2, 2});
    std::int64_t reduction = 1;

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnMseLossBackwardGetWorkspaceSize(grad, self, target, reduction, out, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnMseLossBackward;
};

// Needs a workspace, for the copy of a strided argument.
struct StridedMseLossBackward : MseLossBackward {
    StridedMseLossBackward() { self = {ACL_FLOAT, {2, 2}, {0, 1, 2, 3}, {.strides = Shape{1, 2}}}; }
};

struct BinaryCrossEntropy {
    Tensor self = floats({2, 2}, {0.3}), target = floats({2, 2}, {0.5}), weight = floats({2, 2}, {1});
    Tensor out = floats({2, 2});
    std::int64_t reduction = 0;

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnBinaryCrossEntropyGetWorkspaceSize(self, target, weight, reduction, out, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnBinaryCrossEntropy;
};

struct BinaryCrossEntropyBackward {
    Tensor grad = floats({2, 2}, {0.1}), self = floats({2, 2}, {0.3}), target = floats({2, 2}, {0.5});
    Tensor weight = floats({2, 2}, {1}), out = floats({2, 2});
    std::int64_t reduction = 0;

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnBinaryCrossEntropyBackwardGetWorkspaceSize(grad, self, target, weight, reduction, out, size,
                                                               executor);
    }
    static constexpr PhaseTwo phase_two = aclnnBinaryCrossEntropyBackward;
};

inline std::vector<double> counting(int count, double first = 1) {
    std::vector<double> values;
    for (int index = 0; index < count; ++index) values.push_back(first + index);
    return values;
}

struct Embedding {
    Tensor weight = floats({10, 3}, counting(30)), indices = {ACL_INT64, {4}, {1, 2, 3, 4}}, out = floats({4, 3});

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnEmbeddingGetWorkspaceSize(weight, indices, out, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnEmbedding;
};

struct EmbeddingDenseBackward {
    Tensor grad = floats({2, 3}, counting(6)), indices = {ACL_INT64, {2}, {1, 2}}, out = floats({4, 3}, {-1});
    std::uint64_t num_weights = 4, padding_idx = 0;
    bool scale = false;

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnEmbeddingDenseBackwardGetWorkspaceSize(grad, indices, num_weights, padding_idx, scale, out, size,
                                                           executor);
    }
    static constexpr PhaseTwo phase_two = aclnnEmbeddingDenseBackward;
};

struct OnlineMaxSum {
    Tensor input = {ACL_FLOAT16, {3, 4}, {1}}, weight = {ACL_FLOAT16, {5, 4}, {1}}, target = {ACL_INT32, {3}, {1}};
    std::int64_t start = 0, end = 2;
    Tensor max = floats({3}), sum = floats({3}), predicted = floats({3}, {-1}), mask = {ACL_UINT8, {1}, {255}};
    Tensor masked_target = {ACL_INT32, {3}}, logits = {ACL_FLOAT16, {3, 5}};

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(input, weight, target, start, end, max, sum, predicted,
                                                            mask, masked_target, logits, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnFusedLinearOnlineMaxSum;
};

struct LossWithMaxSum {
    Tensor max = floats({2}, {0.5, 1}), sum = floats({2}, {0.5, 1}), predicted = floats({2}, {0.5, 1});
    float label_smoothing = 0;
    Tensor input = floats({2}), weight = floats({2}), logits = floats({2, 2}, {1, 0.5, 0.5, 1}), loss = floats({2});
    Tensor softmax = floats({2, 2});

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(max, sum, predicted, label_smoothing, input, weight,
                                                                    logits, loss, softmax, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnFusedCrossEntropyLossWithMaxSum;
};

// Smaller than the example; the mode with a softmax.
struct LossGrad {
    std::int64_t rows = 3, hidden = 4, vocabulary = 130;
    aclDataType dtype = ACL_BF16;
    Tensor grad = floats({3}, {1}), input = {dtype, {3, 4}, {1}}, weight = {dtype, {130, 4}, {1}};
    Tensor mask = {ACL_BOOL, {3}, {0}}, masked_target = {ACL_INT32, {3}, {0, 1, 129}};
    float label_smoothing = 0;
    Tensor max, sum, softmax = floats({3, 130}, {0.5});
    Tensor input_grad = {dtype, {3, 4}}, weight_grad = {dtype, {130, 4}};

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(grad, input, weight, mask, masked_target,
                                                                    label_smoothing, max, sum, softmax, input_grad,
                                                                    weight_grad, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnFusedLinearCrossEntropyLossGrad;
};

// The same without a softmax.
struct LossGradFromStatistics : LossGrad {
    LossGradFromStatistics() {
        softmax = {};
        max = floats({3}, {4});
        sum = floats({3}, {130});
    }
};

struct EmaAdam {
    Tensor grad = floats({2, 2, 2}, counting(8)), var = floats({2, 2, 2}, counting(8));
    Tensor m = floats({2, 2, 2}, counting(8)), v = floats({2, 2, 2}, counting(8)), s = floats({2, 2, 2}, counting(8));
    Tensor step = {ACL_INT64, {1}, {10}};
    double lr = 0.001, ema_decay = 0.5, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
    std::int64_t mode = 1;
    bool bias_correction = true;
    double weight_decay = 0.5;

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnApplyFusedEmaAdamGetWorkspaceSize(grad, var, m, v, s, step, lr, ema_decay, beta1, beta2, eps, mode,
                                                      bias_correction, weight_decay, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnApplyFusedEmaAdam;
};

struct InplaceCopy {
    Tensor self = floats({2, 3}), src = floats({2, 3}, counting(6));

    aclnnStatus phase_one(std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnInplaceCopyGetWorkspaceSize(self, src, size, executor);
    }
    static constexpr PhaseTwo phase_two = aclnnInplaceCopy;
};

}  // namespace test
