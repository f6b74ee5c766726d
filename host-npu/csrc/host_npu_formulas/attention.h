// Attention: code shared by the versions of FlashAttentionScore.
#pragma once

#include "host_npu_formulas/attention_blocks.h"
#include "host_npu_formulas/formula.h"

namespace host_npu {

using Ints = std::vector<std::int64_t>;

// The arguments shared by all versions.
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
    // The bits of the dropout mask, sequence by sequence; 1 keeps a weight.
    OptionalIntegerTensor drop_mask = std::nullopt;
    // For the sparse modes 5 and 6: the number of leading keys of each batch that every query attends to.
    Ints prefix = {};
    // A score per head that takes part in the softmax but has no value.
    OptionalTensor sink = std::nullopt;
    // If empty, the statistics of the layout TND are ordered by head within each sequence; otherwise they are in the
    // layout of the input.
    std::string softmax_layout = {};

    bool packed() const { return layout == "TND"; }
};

// Returns the shape of a tensor in a layout, for require_shapes. `number` distinguishes queries from keys, `size` is
// the head size, and `joined` the size of all heads.
std::string shape_in(const std::string& layout, const char* number, const std::string& size, const std::string& joined);

// Throws unless `ends` are valid ends of the sequences of x, the argument `of`.
void require_ends(const char* name, const Ints& ends, const char* of, const Tensor& x);

// Removes trailing zeros from the ends, which mark omitted sequences.
Ints present(const Ints& ends);

// Converts x to [batch, heads, sequence, size], and back.
Tensor by_head(const Tensor& x, const std::string& layout, std::int64_t heads);
Tensor in_layout(const Tensor& x, const std::string& layout);
// Repeats each head of keys or values for the query heads that share it.
Tensor repeated(const Tensor& x, std::int64_t heads);

// The queries, keys and values of one batch or sequence, by head.
struct Inputs {
    Tensor query;
    Tensor key;
    Tensor value;
    std::int64_t heads_of_keys;
    // The factor of each weight, if there is dropout.
    OptionalTensor dropout;
};

Forward attention(const Inputs& in, const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Setting& at);

// Stores the statistics of the softmax in `max` and `sum`.
void attend(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
            const OptionalIntegerTensor& mask, const Setting& at, const Out& max, const Out& sum, const Out& out);

void attend_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                     const OptionalTensor& result, const OptionalTensor& pse, const OptionalIntegerTensor& mask,
                     const Tensor& max, const Tensor& sum, const Setting& at, const Out& dq, const Out& dk,
                     const Out& dv, const OptionalOut& dpse, const OptionalOut& dsink = std::nullopt);

}  // namespace host_npu
