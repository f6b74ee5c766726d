// What is beside attention: results of parts put together, and a softmax with a bias of positions.
#include <ATen/TensorOperators.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// Results over parts of the keys, by the logarithms of their sums.
void merge(const std::vector<Tensor>& logs, const std::vector<Tensor>& results, std::int64_t type, const Out& out,
           const OptionalOut&) {
    TORCH_CHECK(type == 0, "the host NPU has the update type 0 only, not ", type);
    TORCH_CHECK(!logs.empty() && logs.size() == results.size(), "there are ", logs.size(), " lse of ", results.size(),
                " results");
    const auto weights = at::softmax(at::stack(logs), 0).unsqueeze(-1);
    out = (at::stack(results) * weights).sum(0);
}
const Formula<"aclnnAttentionUpdate", merge> merged_attention;

// x is [batch, windows, heads, rows, columns], a mask of 3 dimensions has no heads.
void masked_softmax(const Tensor& x, const OptionalTensor& mask, const Tensor& bias, double scale, std::int64_t,
                    const Out& out) {
    auto scores = x * scale + bias;
    if (mask) scores = scores + (mask->dim() == 3 ? mask->unsqueeze(1) : *mask);
    out = at::softmax(scores, -1);
}
const Formula<"aclnnMaskedSoftmaxWithRelPosBias", masked_softmax> softmax_with_bias;

}  // namespace
}  // namespace host_npu
