// Attention: what the versions of FlashAttentionScore have in common.
#pragma once

#include "host_npu_formulas/attention_blocks.h"
#include "host_npu_formulas/formula.h"

namespace host_npu {

using Ints = std::vector<std::int64_t>;

// What all versions have in common.
struct Setting {
    double scale;
    std::int64_t before;
    std::int64_t after;
    std::int64_t heads;
    std::string layout;
    std::int64_t mode;
    std::int64_t pse_type = 1;
    Ints ends_of_queries = {};
    Ints ends_of_keys = {};
    double keep_prob = 1;
    // The bits of what dropout keeps of the weights, one sequence after the other.
    OptionalIntegerTensor drop_mask = std::nullopt;
    // For the sparse modes 5 and 6: the number of leading keys of each batch that every query attends to.
    Ints prefix = {};
    // A score of each head that takes part in the softmax and attends to nothing.
    OptionalTensor sink = std::nullopt;
    // In the layout TND, each sequence has its statistics by head, unless they are in the layout of the input.
    std::string softmax_layout = {};

    bool packed() const { return layout == "TND"; }
};

// The shape of a tensor in a layout, for require_shapes: `number` tells heads and tokens of queries and keys apart,
// `size` is that of a head, `joined` that of all heads.
std::string shape_in(const std::string& layout, const char* number, const std::string& size, const std::string& joined);

// Throws unless `ends` are those of the sequences of x, the argument `of`.
void require_ends(const char* name, const Ints& ends, const char* of, const Tensor& x);

// The ends without the zeros behind them, which stand for sequences that are left out.
Ints present(const Ints& ends);

// Converts x to [batch, heads, sequence, size], and back.
Tensor by_head(const Tensor& x, const std::string& layout, std::int64_t heads);
Tensor in_layout(const Tensor& x, const std::string& layout);
// Repeats each head of keys or values for its group of the query's heads.
Tensor repeated(const Tensor& x, std::int64_t heads);

// Queries, keys and values of one batch or one sequence, by head.
struct Inputs {
    Tensor query;
    Tensor key;
    Tensor value;
    std::int64_t heads_of_keys;
    // What each weight is multiplied with, if there is dropout.
    OptionalTensor dropout;
};

Forward attention(const Inputs& in, const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Setting& at);

// `max` and `sum` take the statistics of the softmax.
void attend(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
            const OptionalIntegerTensor& mask, const Setting& at, const Out& max, const Out& sum, const Out& out);

void attend_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                     const OptionalTensor& result, const OptionalTensor& pse, const OptionalIntegerTensor& mask,
                     const Tensor& max, const Tensor& sum, const Setting& at, const Out& dq, const Out& dk,
                     const Out& dv, const OptionalOut& dpse, const OptionalOut& dsink = std::nullopt);

}  // namespace host_npu
