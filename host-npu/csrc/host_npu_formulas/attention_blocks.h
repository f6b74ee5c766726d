// Attention and its gradient, a block of scores at a time: what a kernel's cache holds is used before it is evicted,
// and keys that no query of a block attends to are not multiplied.
#pragma once

#include <limits>

#include "host_npu_formulas/formula.h"

namespace host_npu {

// The largest score of a query that attends to nothing.
inline constexpr double kLowest = std::numeric_limits<float>::lowest();

// What becomes of the products of queries and keys. A tensor of scores has four dimensions, and 1 where it is the same
// for all.
struct Scores {
    double scale;
    // Added after the scale.
    OptionalTensor summand = std::nullopt;
    // Which are left out, and the largest difference of a key's number and its query's that is not left out for sure.
    OptionalTensor left_out = std::nullopt;
    std::int64_t last;
    // What each weight is multiplied with.
    OptionalTensor dropout = std::nullopt;
    // A score of each head that takes part in the softmax and attends to nothing.
    OptionalTensor sink = std::nullopt;
};

// The statistics are those of each row of scores.
struct Forward {
    Tensor result, max, sum;
};

struct Gradients {
    Tensor query, key, value, summand, sink;
};

// Attention of tensors [batch, heads, sequence, size]. `result`, `max` and `sum` are those of the attention to all
// keys, of which `key` may be a part, as in ring attention. Without `result`, these keys are all.
Forward attend_in_blocks(const Tensor& query, const Tensor& key, const Tensor& value, const Scores& scores);
Gradients gradients_in_blocks(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                              const OptionalTensor& result, const Tensor& max, const Tensor& sum, const Scores& scores);

}  // namespace host_npu
