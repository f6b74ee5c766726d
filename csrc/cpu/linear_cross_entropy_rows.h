// The row kernels, compiled for each instruction set.

#pragma once

#include <cstdint>
#include <string>

namespace torch_aclnn_ops {

// The coefficients in the gradient of the loss with respect to a row of logits z:
// (log_sum_exp + square * logsumexp(z)) * softmax(z) + predicted * onehot(target).
struct Factors {
    float log_sum_exp;
    float predicted;
    float square;
};

struct Statistics {
    float logits_max;
    float log_sum_exp;  // log sum exp(z - logits_max)
    float predicted;    // z[target] - logits_max, or 0 if the target is invalid
};

// A number in bfloat16.
struct BFloat16 {
    uint16_t bits;
};

struct RowKernels {
    // The instruction set that they are compiled for: NEON, or torch's name.
    const char* vectors;
    // Returns the statistics of logits.
    Statistics (*reduce)(const float* row, int64_t classes, int64_t target);
    // Overwrites logits with their softmax, and returns log sum exp(z - logits_max).
    float (*softmax)(float* row, int64_t classes, float logits_max);
    // Write the gradient of logits, which are overwritten; it may be written over them.
    Statistics (*float_gradient)(float* row, int64_t classes, int64_t target, const Factors& factors, float* out);
    Statistics (*bfloat16_gradient)(float* row, int64_t classes, int64_t target, const Factors& factors, BFloat16* out);
};

// Returns the kernels for the instruction set that torch's own kernels use.
const RowKernels& row_kernels(const std::string& capability);

}  // namespace torch_aclnn_ops
