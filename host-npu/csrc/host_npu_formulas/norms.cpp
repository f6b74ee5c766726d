// RmsNorm and its relatives. gamma has the sizes of the last dimensions, which are normalized.
#include "host_npu_formulas/norms.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rsqrt.h>

#include <numeric>

namespace host_npu {
std::vector<std::int64_t> normalized(const Tensor& x, const Tensor& gamma) {
    TORCH_CHECK(gamma.dim() >= 1 && gamma.dim() <= x.dim() &&
                    x.sizes().slice(static_cast<std::size_t>(x.dim() - gamma.dim())) == gamma.sizes(),
                "gamma has shape ", gamma.sizes(), ", which is not the end of x's ", x.sizes());
    std::vector<std::int64_t> dims(static_cast<std::size_t>(gamma.dim()));
    std::iota(dims.begin(), dims.end(), -gamma.dim());
    return dims;
}

namespace {

void rms_norm(const Tensor& x, const Tensor& gamma, double epsilon, const Out& y, const Out& rstd) {
    const auto scale = at::rsqrt((x * x).mean(normalized(x, gamma), true) + epsilon);
    rstd = scale;
    y = x * scale * gamma;
}
const Formula<"aclnnRmsNorm", rms_norm> forward;

// Gemma's gamma is the difference from 1.
void gemma_rms_norm(const Tensor& x, const Tensor& gamma, double epsilon, const Out& y, const Out& rstd) {
    rms_norm(x, gamma + 1, epsilon, y, rstd);
}
const Formula<"aclnnGemmaRmsNorm", gemma_rms_norm> gemma;

void add_rms_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon, const Out& y,
                  const Out& rstd, const Out& x) {
    x = x1 + x2;
    rms_norm(x.rounded(), gamma, epsilon, y, rstd);
}
const Formula<"aclnnAddRmsNorm", add_rms_norm> sum;

// The sum takes the place of x2, what is normalized that of x1.
void add_rms_norm_in_place(const Out& x1, const Out& x2, const Tensor& gamma, double epsilon, const Out& rstd) {
    x2 = x1.rounded() + x2.rounded();
    rms_norm(x2.rounded(), gamma, epsilon, x1, rstd);
}
const Formula<"aclnnInplaceAddRmsNorm", add_rms_norm_in_place> sum_in_place;

// y1 is what y2 rounded to.
void add_rms_norm_cast(const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon, const Out& y1,
                       const Out& y2, const Out& rstd, const Out& x) {
    add_rms_norm(x1, x2, gamma, epsilon, y2, rstd, x);
    y1 = y2.rounded();
}
const Formula<"aclnnAddRmsNormCast", add_rms_norm_cast> sum_and_cast;

void rms_norm_grad(const Tensor& dy, const Tensor& x, const Tensor& rstd, const Tensor& gamma, const Out& dx,
                   const Out& dgamma) {
    const auto dims = normalized(x, gamma);
    const auto unit = x * rstd;
    const auto scaled = dy * gamma;
    dx = rstd * (scaled - unit * (scaled * unit).mean(dims, true));
    dgamma = (dy * unit).sum_to_size(gamma.sizes());
}
const Formula<"aclnnRmsNormGrad", rms_norm_grad> backward;

}  // namespace
}  // namespace host_npu
