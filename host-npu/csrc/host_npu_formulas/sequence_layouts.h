// Sequences of tokens for attention to chosen keys, in the layouts BSND, TND and PA_BSND, which has its tokens in the
// blocks of a table.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

struct Sequences {
    const Tensor& tokens;
    const std::string& layout;
    const OptionalIntegerTensor& lengths;
    OptionalIntegerTensor table = std::nullopt;

    // Where the rows of a sequence begin, and how many there are.
    std::pair<std::int64_t, std::int64_t> rows(std::int64_t number) const;
    // What is a sequence's of a tensor in this layout.
    Tensor of(const Tensor& x, std::int64_t number) const;
    std::int64_t count() const { return layout == "TND" ? lengths->size(0) : tokens.size(0); }
};

// Throws unless the layouts, lengths and shapes go together: `of_queries` is the shape of a token of queries, keys have
// one head of `size` elements.
void require_sequences(const Sequences& queries, const Sequences& keys, const std::string& of_queries,
                       const std::string& size);

// Keys behind a query's own count (0) or do not (3); the last query comes with the last key. No other band is taken.
void require_band(std::int64_t mode, std::int64_t before, std::int64_t after);

}  // namespace host_npu
