// SwiGlu: SiLU of the first half of a dimension, times the second half.
#include <algorithm>

#include "host_npu_formulas/halves.h"

namespace host_npu {
namespace {

void swiglu(const Tensor& x, std::int64_t dim, const Out& out) {
    const auto [gate, value] = halves(x, dim);
    out = at::silu(gate) * value;
}
const Formula<"aclnnSwiGlu", swiglu> swiglu_forward{
    {"x", kFloats, "* ..."},
    {"out", as("x")},
};

void swiglu_grad(const Tensor& grad, const Tensor& x, std::int64_t dim, const Out& out) {
    const auto [gate, value] = halves(x, dim);
    TORCH_CHECK(grad.sizes() == gate.sizes(), "yGrad has shape ", grad.sizes(), " instead of ", gate.sizes(),
                ", half of x in dimension ", dim);
    const auto s = at::sigmoid(gate);
    out = at::cat({grad * value * s * (1 + gate * (1 - s)), grad * gate * s}, dim);
}
const Formula<"aclnnSwiGluGrad", swiglu_grad> swiglu_backward{
    {"yGrad", kFloats},
    {"x", kFloats, "...x"},
    {"out", kFloats, "...x"},
};

// `groups` has the numbers of rows of groups, where rows span all dimensions before `dim`. Later rows are unchanged.
void clipped_swiglu(const Tensor& x, const OptionalIntegerTensor& groups, std::int64_t dim, double alpha, double limit,
                    double bias, bool interleaved, const Out& out) {
    const auto axis = c10::maybe_wrap_dim(dim, x.dim());
    const auto last = axis == x.dim() - 1;
    TORCH_CHECK(last || !interleaved, "the host NPU interleaves the last dimension only, not ", dim);
    TORCH_CHECK(x.size(dim) % 2 == 0, "a dimension of ", x.size(dim), " elements cannot be halved");
    const auto parts = interleaved ? x.unflatten(-1, {-1, 2}).unbind(-1) : x.chunk(2, dim);
    const auto gate = parts[0].clamp_max(limit);
    const auto result = gate * at::sigmoid(gate * alpha) * (parts[1].clamp(-limit, limit) + bias);
    if (!groups || groups->is_meta()) {
        out = result;
        return;
    }
    const auto rows = c10::multiply_integers(x.sizes().slice(0, axis));
    const auto count = std::min(rows, groups->sum().item<std::int64_t>());
    TORCH_CHECK(count >= 0, "group_index has the sum ", count);
    out.in_place().view({rows, -1}).slice(0, 0, count).copy_(result.reshape({rows, -1}).slice(0, 0, count));
}
const Formula<"aclnnClippedSwiglu", clipped_swiglu> clipped_swiglu_forward;

}  // namespace
}  // namespace host_npu
