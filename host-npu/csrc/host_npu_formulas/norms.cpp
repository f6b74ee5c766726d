// RmsNorm and its variants. gamma has the shape of the last dimensions, which are normalized.
#include "host_npu_formulas/norms.h"

#include <numeric>

#include "opapi/chip.h"

namespace host_npu {
std::vector<std::int64_t> normalized(const Tensor& x, const Tensor& gamma) {
    TORCH_CHECK(gamma.dim() >= 1 && gamma.dim() <= x.dim() &&
                    x.sizes().slice(static_cast<std::size_t>(x.dim() - gamma.dim())) == gamma.sizes(),
                "gamma has shape ", gamma.sizes(), ", which is not the end of x's ", x.sizes());
    std::vector<std::int64_t> dims(static_cast<std::size_t>(gamma.dim()));
    std::iota(dims.begin(), dims.end(), -gamma.dim());
    return dims;
}

RmsNormal rms_normal(const Tensor& x, const Tensor& gamma, double epsilon, const OptionalTensor& beta) {
    const auto rstd = at::rsqrt(x.square().mean(normalized(x, gamma), true) + epsilon);
    const auto scaled = x * rstd * gamma;
    return {beta ? scaled + *beta : scaled, rstd};
}

namespace {

void rms_norm(const Tensor& x, const Tensor& gamma, double epsilon, const Out& y, const Out& rstd) {
    const auto [result, scale] = rms_normal(x, gamma, epsilon);
    rstd = scale;
    y = result;
}
const Formula<"aclnnRmsNorm", rms_norm> forward{
    {"x", kFloats, "* ..."},
    {"gamma", as("x") | newer(kFloat), "* ..."},
    {"yOut", as("x")},
    {"rstdOut", kFloat},
};

// Gemma stores gamma - 1.
void gemma_rms_norm(const Tensor& x, const Tensor& gamma, double epsilon, const Out& y, const Out& rstd) {
    rms_norm(x, gamma + 1, epsilon, y, rstd);
}
const Formula<"aclnnGemmaRmsNorm", gemma_rms_norm> gemma;

// The input of the norm. A2 and A3 round the sum first, the other chips do not.
Tensor summed(const Tensor& x1, const Tensor& x2, at::ScalarType dtype) {
    require_shapes({{"x1", x1.sizes(), "...x1"}, {"x2", x2.sizes(), "...x1"}});
    const auto sum = x1 + x2;
    return is_a2_or_a3() ? widened(sum.to(dtype)) : sum;
}

// Without `rstd`, gamma is [1, size].
void add_rms_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon, const Out& y,
                  const OptionalOut& rstd, const OptionalOut& x) {
    TORCH_CHECK(x || !rstd, "rstdOut without xOut");
    TORCH_CHECK(rstd || (gamma.dim() == 2 && gamma.size(0) == 1), "without rstdOut gamma has shape ", gamma.sizes(),
                " instead of [1, the last dimension of x1]");
    const auto [result, scale] = rms_normal(summed(x1, x2, y.dtype()), rstd ? gamma : gamma[0], epsilon);
    if (x) *x = x1 + x2;
    y = result;
    if (rstd) *rstd = scale;
}
const Formula<"aclnnAddRmsNorm", add_rms_norm> sum{
    {"x1", kFloats, "A ...x"},    {"x2", as("x1"), "A ...x"}, {"gamma", as("x1"), "* ..."},
    {"yOut", as("x1"), "A ...x"}, {"rstdOut", kFloat},        {"xOut", as("x1"), "A ...x"},
};

// The sum replaces x2, and the normalized sum x1.
void add_rms_norm_in_place(const Out& x1, const Out& x2, const Tensor& gamma, double epsilon, const Out& rstd) {
    const auto sum = summed(x1.rounded(), x2.rounded(), x2.dtype());
    x2 = sum;
    rms_norm(sum, gamma, epsilon, x1, rstd);
}
const Formula<"aclnnInplaceAddRmsNorm", add_rms_norm_in_place> sum_in_place;

// y1 is y2 rounded.
void add_rms_norm_cast(const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon, const Out& y1,
                       const Out& y2, const Out& rstd, const Out& x) {
    add_rms_norm(x1, x2, gamma, epsilon, y2, rstd, x);
    y1 = y2.rounded();
}
const Formula<"aclnnAddRmsNormCast", add_rms_norm_cast> sum_and_cast;

// The factor of each row may include dimensions of size 1 for the normalized dimensions.
void rms_norm_grad(const Tensor& dy, const Tensor& x, const Tensor& factors, const Tensor& gamma, const Out& dx,
                   const Out& dgamma) {
    const auto dims = normalized(x, gamma);
    const auto rstd = factors.reshape(x.mean(dims, true).sizes());
    const auto unit = x * rstd;
    const auto scaled = dy * gamma;
    dx = rstd * (scaled - unit * (scaled * unit).mean(dims, true));
    dgamma = (dy * unit).sum_to_size(gamma.sizes());
}
const Formula<"aclnnRmsNormGrad", rms_norm_grad> backward{
    {"dy", kFloats, "A B ...x"},
    {"x", as("dy"), "A B ...x"},
    {"rstd", kFloat},
    {"gamma", as("dy") | newer(kFloat), "* ..."},
    {"dxOut", as("dy"), "A B ...x"},
    {"dgammaOut", kFloat},
};

}  // namespace
}  // namespace host_npu
