// Sparse tensors: the function that torch_npu calls for aten::_coalesce.
#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// Sums the entries with the same index. `places` has the position of each entry in the result; of the first argument,
// the unique indices, only the number matters.
void coalesce(const IntegerTensor&, const IntegerTensor& places, const IntegerTensor& indices, const AnyTensor& values,
              const Out& new_indices, const Out& new_values) {
    const auto to = places.to(at::kLong);
    const auto wide = values.is_floating_point() ? widened(values) : Tensor(values);
    new_indices = at::zeros(new_indices.sizes(), indices.options()).index_copy_(0, to, indices);
    new_values = at::zeros(new_values.sizes(), wide.options()).index_add_(0, to, wide);
}
const Formula<"aclnnCoalesceSparse", coalesce> coalesce_sparse{
    {"uniqueLen", kIndices, "U"},    {"uniqueIndices", kIndices, "N"},
    {"indices", kIndices, "N M"},    {"values", {ACL_FLOAT, ACL_FLOAT16, ACL_INT32}, "N ...v"},
    {"newIndices", kIndices, "U M"}, {"newValues", as("values"), "U ...v"},
};

}  // namespace
}  // namespace host_npu
