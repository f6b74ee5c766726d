// Approximations of GELU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

constexpr double kFastGelu = 1.702;

void fast_gelu(const Tensor& x, const Out& out) { out = x * at::sigmoid(x * kFastGelu); }
const Formula<"aclnnFastGelu", fast_gelu> fast_gelu_forward;

void fast_gelu_grad(const Tensor& grad, const Tensor& x, const Out& out) {
    const auto s = at::sigmoid(x * kFastGelu);
    out = grad * s * (1 + x * kFastGelu * (1 - s));
}
const Formula<"aclnnFastGeluBackward", fast_gelu_grad> fast_gelu_backward;

}  // namespace
}  // namespace host_npu
