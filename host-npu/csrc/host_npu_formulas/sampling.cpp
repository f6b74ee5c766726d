// The filtering of logits before sampling.
#include <limits>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// Keeps the k largest logits of each row, and of these the most likely ones until their probabilities sum to p.
void apply_top_k_top_p(const Tensor& logits, const OptionalTensor& p, const OptionalIntegerTensor& k, const Out& out) {
    TORCH_CHECK(logits.dim() == 2, "logits have ", logits.dim(), " dimensions instead of 2");
    const auto rows = logits.size(0), last = logits.size(1) - 1;
    TORCH_CHECK((!p || p->numel() == rows) && (!k || k->numel() == rows), "p and k must have one element per row");
    const auto minus_infinity = -std::numeric_limits<double>::infinity();
    auto [sorted, places] = logits.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/false);
    if (k) {
        const auto first = (last + 1 - k->to(at::kLong)).clamp(0, last).reshape({rows, 1});
        sorted = sorted.masked_fill(sorted < sorted.gather(1, first), minus_infinity);
    }
    if (p) {
        auto dropped = sorted.softmax(-1).cumsum(-1) <= 1 - p->reshape({rows, 1});
        dropped.select(1, last).fill_(false);
        sorted = sorted.masked_fill(dropped, minus_infinity);
    }
    out = at::full_like(logits, 0).scatter(1, places, sorted);
}
const Formula<"aclnnApplyTopKTopP", apply_top_k_top_p> top_k_top_p;

}  // namespace
}  // namespace host_npu
