// GELU, its approximations, and GeGlu: GELU of one half of a dimension, times the other half.
#include "host_npu_formulas/halves.h"

namespace host_npu {
namespace {

constexpr double kFastGelu = 1.702;

void fast_gelu(const Tensor& x, const Out& out) { out = x * at::sigmoid(x * kFastGelu); }
const Formula<"aclnnFastGelu", fast_gelu> fast_gelu_forward{
    {"self", kFloats, "...x"},
    {"out", kFloats, "...x"},
};

void fast_gelu_grad(const Tensor& grad, const Tensor& x, const Out& out) {
    const auto s = at::sigmoid(x * kFastGelu);
    out = grad * s * (1 + x * kFastGelu * (1 - s));
}
const Formula<"aclnnFastGeluBackward", fast_gelu_grad> fast_gelu_backward{
    {"gradOutput", kFloats, "...x"},
    {"self", kFloats, "...x"},
    {"gradInput", kFloats, "...x"},
};

// Returns PyTorch's name of an approximation. Some functions of CANN take the number, others the name.
std::string approximation(std::int64_t number) {
    TORCH_CHECK(number == 0 || number == 1, "approximate is ", number, " instead of 0 (none) or 1 (tanh)");
    return number == 0 ? "none" : "tanh";
}

void gelu(const Tensor& x, std::int64_t approximate, const Out& out) { out = at::gelu(x, approximation(approximate)); }
const Formula<"aclnnGeluV2", gelu> gelu_forward{
    {"x", kFloats, "...x"},
    {"y", as("x"), "...x"},
};

void gelu_grad(const Tensor& grad, const Tensor& x, const std::string& approximate, const Out& out) {
    out = at::gelu_backward(grad, x, approximate);
}
const Formula<"aclnnGeluBackwardV2", gelu_grad> gelu_grad_v2{
    {"gradOutput", kFloats},
    {"self", kFloats},
    {"gradInput", kFloats},
};

// The second of the pair is the half that goes through GELU.
std::pair<Tensor, Tensor> factor_and_activated(const Tensor& x, std::int64_t dim, bool activate_left) {
    const auto [left, right] = halves(x, dim);
    return activate_left ? std::pair(right, left) : std::pair(left, right);
}

void geglu(const Tensor& x, std::int64_t dim, std::int64_t approximate, bool activate_left, const Out& out,
           const Out& out_gelu) {
    const auto [factor, activated] = factor_and_activated(x, dim, activate_left);
    const auto gelu = at::gelu(activated, approximation(approximate));
    out = factor * gelu;
    out_gelu = gelu;
}
const Formula<"aclnnGeGluV3", geglu> geglu_forward{
    {"self", kFloats, "* ..."},
    {"out", kFloats, "...y"},
    {"outGelu", kFloats, "...y"},
};

void geglu_grad(const Tensor& grad, const Tensor& x, const Tensor& gelu, std::int64_t dim, std::int64_t approximate,
                bool activate_left, const Out& out) {
    const auto [factor, activated] = factor_and_activated(x, dim, activate_left);
    const auto of_factor = grad * gelu;
    const auto of_activated = at::gelu_backward(grad * factor, activated, approximation(approximate));
    out = activate_left ? at::cat({of_activated, of_factor}, dim) : at::cat({of_factor, of_activated}, dim);
}
const Formula<"aclnnGeGluV3Backward", geglu_grad> geglu_backward{
    {"gradOutput", kFloats, "...y"},
    {"self", kFloats, "...x"},
    {"gelu", kFloats, "...y"},
    {"gradInput", kFloats, "...x"},
};

}  // namespace
}  // namespace host_npu
