// Products of groups of rows or columns with one matrix per group.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

using TensorList = std::vector<Tensor>;
using AnyTensorList = std::vector<AnyTensor>;
using Sizes = std::vector<std::int64_t>;

// The options of a group's product.
struct GroupOptions {
    const std::vector<AnyTensor>& bias;
    const TensorList& scale;
    const TensorList& token_scale;
    const TensorList& antiquant_scale;
    const TensorList& antiquant_offset;
    std::int64_t activation;
    std::int64_t groups;
    // The offsets of int8 results, which are encoded in their scales.
    TensorList offset{};

    // Returns a group's numbers: a tensor of the list, or a row of its only tensor.
    Tensor of_group(const TensorList& list, std::int64_t group) const;
};

// Splits a single batched tensor into matrices; returns other lists unchanged.
TensorList without_batches(const TensorList& matrices);
// Returns the sizes of groups with these ends.
Sizes sizes_from_ends(Sizes ends);

// Returns the product of a group's rows, which start at row `first` of x.
Tensor group_product(const Tensor& rows, const Tensor& weight, std::int64_t group, std::int64_t first,
                     const GroupOptions& options);
// Splits the rows of x into consecutive groups. The result has no usable values after the last group.
void split_rows(const Tensor& x, const AnyTensorList& weight, const IntegerTensor& list, std::int64_t type,
                const GroupOptions& options, const Out& out);
// One group per tensor of x; the products are concatenated to one output.
void join_rows(const AnyTensorList& x, const AnyTensorList& weight, const OptionalIntegerTensor& list,
               std::int64_t type, const GroupOptions& options, const Out& out);
// One product per group of columns of `x` and rows of `weight`.
TensorList split_sums(const Tensor& x, const Tensor& weight, const IntegerTensor& list, std::int64_t type);

}  // namespace host_npu
