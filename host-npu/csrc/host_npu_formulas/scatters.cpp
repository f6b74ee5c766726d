// Writes to parts of a tensor.
#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// The last dimension of `indices` names rows of x by their first dimensions.
void scatter_nd(const Out& x, const IntegerTensor& indices, const Tensor& updates) {
    c10::List<OptionalTensor> dims;
    for (const auto& dim : indices.to(at::kLong).unbind(-1)) dims.push_back(dim);
    x = x.rounded().index_put(dims, updates);
}
const Formula<"aclnnScatterNdUpdate", scatter_nd> scattered_rows;

}  // namespace
}  // namespace host_npu
