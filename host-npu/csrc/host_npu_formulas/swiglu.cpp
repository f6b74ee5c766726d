// SwiGlu: the first half of a dimension, through SiLU, times the second.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include "host_npu_formulas/halves.h"

namespace host_npu {
namespace {

void swiglu(const Tensor& x, std::int64_t dim, const Out& out) {
    const auto [gate, value] = halves(x, dim);
    out = at::silu(gate) * value;
}
const Formula<"aclnnSwiGlu", swiglu> swiglu_forward;

void swiglu_grad(const Tensor& grad, const Tensor& x, std::int64_t dim, const Out& out) {
    const auto [gate, value] = halves(x, dim);
    const auto s = at::sigmoid(gate);
    out = at::cat({grad * value * s * (1 + gate * (1 - s)), grad * gate * s}, dim);
}
const Formula<"aclnnSwiGluGrad", swiglu_grad> swiglu_backward;

}  // namespace
}  // namespace host_npu
