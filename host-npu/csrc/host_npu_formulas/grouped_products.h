// Products of groups of rows or columns with a matrix each.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

using TensorList = std::vector<Tensor>;
using AnyTensorList = std::vector<AnyTensor>;
using Sizes = std::vector<std::int64_t>;

// What is done to the rows of a group.
struct GroupOptions {
    const std::vector<AnyTensor>& bias;
    const TensorList& scale;
    const TensorList& token_scale;
    const TensorList& antiquant_scale;
    const TensorList& antiquant_offset;
    std::int64_t activation;
    std::int64_t groups;
    // The offsets of int8 results, which are in the bits of their scales.
    TensorList offset{};

    // The numbers of a list that are for a group: those of its own tensor, or of a row of the one.
    Tensor of_group(const TensorList& list, std::int64_t group) const;
};

// The matrices of one tensor, or those that there are.
TensorList without_batches(const TensorList& matrices);
// Returns the sizes of groups that end at these rows.
Sizes sizes_from_ends(Sizes ends);

// The product of the rows of a group, which begin at the row `first` of x.
Tensor group_product(const Tensor& rows, const Tensor& weight, std::int64_t group, std::int64_t first,
                     const GroupOptions& options);
// The rows of one matrix go to the groups one after the other. Those after the last group are not a part of the result,
// which has no usable values there.
void split_rows(const Tensor& x, const AnyTensorList& weight, const IntegerTensor& list, std::int64_t type,
                const GroupOptions& options, const Out& out);
// A group for each tensor of x, whose products are the rows of one output.
void join_rows(const AnyTensorList& x, const AnyTensorList& weight, const OptionalIntegerTensor& list,
               std::int64_t type, const GroupOptions& options, const Out& out);
// A product for each group of columns of `x` and rows of `weight`.
TensorList split_sums(const Tensor& x, const Tensor& weight, const IntegerTensor& list, std::int64_t type);

}  // namespace host_npu
