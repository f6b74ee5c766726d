// Sequences of tokens for sparse attention, in the layouts BSND, TND and PA_BSND (blocks of a table).
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

struct Sequences {
    const Tensor& tokens;
    const std::string& layout;
    const OptionalIntegerTensor& lengths;
    OptionalIntegerTensor table = std::nullopt;

    // The first row and the number of rows of a sequence.
    std::pair<std::int64_t, std::int64_t> rows(std::int64_t number) const;
    // The part of a tensor in this layout that belongs to a sequence.
    Tensor of(const Tensor& x, std::int64_t number) const;
    std::int64_t count() const { return layout == "TND" ? lengths->size(0) : tokens.size(0); }
};

// Throws unless layouts, lengths and shapes match. `of_queries` is a query token's shape; keys have one head of `size`.
void require_sequences(const Sequences& queries, const Sequences& keys, const std::string& of_queries,
                       const std::string& size);

// Requires the mode 0 (no mask) or 3 (causal, aligned at the last tokens), and no other band.
void require_band(std::int64_t mode, std::int64_t before, std::int64_t after);

}  // namespace host_npu
