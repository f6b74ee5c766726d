// Attention and its gradient in blocks of scores, which are used while they are in the cache. Keys that no query of a
// block attends to are skipped.
#pragma once

#include <limits>

#include "host_npu_formulas/formula.h"

namespace host_npu {

// The maximum score of a query that attends to nothing.
inline constexpr double kLowest = std::numeric_limits<float>::lowest();

// How products of queries and keys become weights. Tensors of scores have four dimensions, of size 1 to broadcast.
struct Scores {
    double scale;
    // Added to the scaled products.
    OptionalTensor summand = std::nullopt;
    // The mask (1: masked), and the largest key index minus query index of a score that may be unmasked.
    OptionalTensor left_out = std::nullopt;
    std::int64_t last;
    // The factor of each weight.
    OptionalTensor dropout = std::nullopt;
    // A score per head that takes part in the softmax but has no value.
    OptionalTensor sink = std::nullopt;
};

// The result, and the softmax statistics of each row of scores.
struct Forward {
    Tensor result, max, sum;
};

struct Gradients {
    Tensor query, key, value, summand, sink;
};

// Attention over tensors [batch, heads, sequence, size]. `result`, `max` and `sum` are those over all keys, of which
// `key` may be a part, as in ring attention. Without `result`, `key` must have all keys.
Forward attend_in_blocks(const Tensor& query, const Tensor& key, const Tensor& value, const Scores& scores);
Gradients gradients_in_blocks(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                              const OptionalTensor& result, const Tensor& max, const Tensor& sum, const Scores& scores);

}  // namespace host_npu
