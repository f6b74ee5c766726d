// Operators of PyTorch that functions of torch_npu's own call by their names in CANN.
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

void softmax(const Tensor& x, std::int64_t dim, const Out& out) { out = at::softmax(x, dim); }
const Formula<"aclnnSoftmax", softmax> softmax_of;

void softmax_grad(const Tensor& grad, const Tensor& y, std::int64_t dim, const Out& out) {
    out = at::_softmax_backward_data(grad, y, dim, at::kFloat);
}
const Formula<"aclnnSoftmaxBackward", softmax_grad> softmax_derivative;

void index_add(const Tensor& x, std::int64_t dim, const IntegerTensor& index, const Tensor& source, const Number& alpha,
               std::int64_t, const Out& out) {
    out = x.index_add(dim, index.to(at::kLong), source, alpha.value);
}
const Formula<"aclnnIndexAddV2", index_add> rows_added_at_indices;

// The sums of what each element was repeated to.
void repeat_interleave_grad(const Tensor& grad, const IntegerTensor& repeats, std::int64_t axis, const Out& out) {
    const auto dim = c10::maybe_wrap_dim(axis, grad.dim());
    TORCH_CHECK(repeats.dim() == 1, "repeats has ", repeats.dim(), " dimensions instead of 1");
    auto sizes = grad.sizes().vec();
    sizes[static_cast<std::size_t>(dim)] = repeats.size(0);
    const auto zeros = at::zeros(sizes, grad.options());
    if (repeats.is_meta()) {
        out = zeros;
        return;
    }
    const auto sources = at::arange(repeats.size(0), repeats.options().dtype(at::kLong)).repeat_interleave(repeats);
    out = zeros.index_add(dim, sources, grad);
}
const Formula<"aclnnRepeatInterleaveGrad", repeat_interleave_grad> sums_of_repeats;

// What a mean divides by.
double divisor(const Tensor& each, std::int64_t reduction) {
    return reduction == at::Reduction::Mean ? static_cast<double>(each.numel()) : 1;
}

void bce_with_logits_grad(const Tensor& grad, const Tensor& x, const Tensor& target, const OptionalTensor& weight,
                          const OptionalTensor& pos_weight, std::int64_t reduction, const Out& out) {
    const auto s = at::sigmoid(x);
    // -p t log s - (1 - t) log (1 - s) has the derivative s (p t + 1 - t) - p t.
    const auto positive = pos_weight ? *pos_weight * target : Tensor(target);
    auto each = (s * (positive + 1 - target) - positive) * grad;
    if (weight) each = each * *weight;
    out = each / divisor(each, reduction);
}
const Formula<"aclnnBinaryCrossEntropyWithLogitsBackward", bce_with_logits_grad> cross_entropy_of_logits_derivative;

void kl_div_grad(const Tensor& grad, const Tensor& x, const Tensor& target, std::int64_t reduction, bool is_log,
                 const Out& out) {
    const auto each = -(is_log ? target.exp() : target) * grad;
    const auto inside = is_log ? each : each.masked_fill(target.le(0), 0);
    out = (inside / divisor(inside, reduction)).expand_as(x);
}
const Formula<"aclnnKlDivBackward", kl_div_grad> divergence_derivative;

void kl_div_target_grad(const Tensor& grad, const Tensor& x, const Tensor& target, std::int64_t reduction, bool is_log,
                        const Out& out) {
    // t (log t - x), or exp(t) (t - x), and 0 where t is.
    const auto each = is_log ? target.exp() * (target - x + 1) : target.log() - x + 1;
    const auto inside = is_log ? each : each.masked_fill(target.eq(0), 0);
    out = inside * grad / divisor(inside, reduction);
}
const Formula<"aclnnKlDivTargetBackward", kl_div_target_grad> divergence_derivative_of_target;

void l1_loss_grad(const Tensor& grad, const Tensor& x, const Tensor& target, std::int64_t reduction, const Out& out) {
    const auto each = (x - target).sign() * grad;
    out = each / divisor(each, reduction);
}
const Formula<"aclnnL1LossBackward", l1_loss_grad> absolute_error_derivative;

}  // namespace
}  // namespace host_npu
