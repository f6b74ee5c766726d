// PyTorch's products, softmax, sums and losses under their names in CANN.
#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

using Ints = std::vector<std::int64_t>;

// The math type of the cube unit is ignored: on the host it does not change the result.
void matmul(const Tensor& x, const Tensor& y, const Out& out, std::int8_t) { out = at::matmul(x, y); }
const Formula<"aclnnMatmul", matmul> matrices;

void mm(const Tensor& x, const Tensor& y, const Out& out, std::int8_t) {
    TORCH_CHECK(x.dim() == 2 && y.dim() == 2, "matrices of ", x.dim(), " and ", y.dim(), " dimensions instead of 2");
    out = at::matmul(x, y);
}
const Formula<"aclnnMm", mm> two_matrices;

void batch_matmul(const Tensor& x, const Tensor& y, const Out& out, std::int8_t) {
    TORCH_CHECK(x.dim() == 3 && y.dim() == 3, "batches of ", x.dim(), " and ", y.dim(), " dimensions instead of 3");
    out = at::matmul(x, y);
}
const Formula<"aclnnBatchMatMul", batch_matmul> batches_of_matrices;

void addmm(const Tensor& added, const Tensor& x, const Tensor& y, const Number& beta, const Number& alpha,
           const Out& out, std::int8_t) {
    out = at::addmm(added, x, y, beta.value, alpha.value);
}
const Formula<"aclnnAddmm", addmm> added_matrices;

void softmax(const Tensor& x, std::int64_t dim, const Out& out) { out = at::softmax(x, dim); }
const Formula<"aclnnSoftmax", softmax> softmax_of;

void softmax_grad(const Tensor& grad, const Tensor& y, std::int64_t dim, const Out& out) {
    out = at::_softmax_backward_data(grad, y, dim, at::kFloat);
}
const Formula<"aclnnSoftmaxBackward", softmax_grad> softmax_derivative;

void log_softmax(const Tensor& x, std::int64_t dim, const Out& out) { out = at::log_softmax(x, dim); }
const Formula<"aclnnLogSoftmax", log_softmax> log_softmax_of;

void log_softmax_grad(const Tensor& grad, const Tensor& y, std::int64_t dim, const Out& out) {
    out = at::_log_softmax_backward_data(grad, y, dim, at::kFloat);
}
const Formula<"aclnnLogSoftmaxBackward", log_softmax_grad> log_softmax_derivative;

// The dtype argument equals that of the output.
void reduce_sum(const AnyTensor& x, const Ints& dims, bool keeps, std::int32_t, const Out& out) {
    out = at::sum(x.is_floating_point() ? widened(x) : Tensor(x), dims, keeps);
}
const Formula<"aclnnReduceSum", reduce_sum> sum_of;

void mean(const AnyTensor& x, const Ints& dims, bool keeps, std::int32_t, const Out& out) {
    TORCH_CHECK(!x.is_complex(), "the host NPU computes no mean of ", x.scalar_type());
    out = at::mean(widened(x), dims, keeps);
}
const Formula<"aclnnMean", mean> mean_of;

// torch_npu's gradient of renorm calls it.
void vector_norm(const Tensor& x, const Number& order, const Ints& dims, bool keeps, std::int32_t, const Out& out) {
    out = at::linalg_vector_norm(x, order.value, dims, keeps);
}
const Formula<"aclnnLinalgVectorNorm", vector_norm> norm_of;

void cumsum(const AnyTensor& x, std::int64_t dim, std::int32_t, const Out& out) {
    out = at::cumsum(x.is_floating_point() ? widened(x) : Tensor(x), dim);
}
const Formula<"aclnnCumsum", cumsum> running_sum;

void cat(const std::vector<AnyTensor>& tensors, std::int64_t dim, const Out& out) {
    out = at::cat(std::vector<Tensor>(tensors.begin(), tensors.end()), dim);
}
const Formula<"aclnnCat", cat> one_after_the_other;

void index_select(const AnyTensor& x, std::int64_t dim, const IntegerTensor& index, const Out& out) {
    out = at::index_select(x, dim, index);
}
const Formula<"aclnnIndexSelect", index_select> rows_of_indices;

// The dimension is replaced by the dimensions of the index.
void gather_v3(const AnyTensor& x, std::int64_t dim, const IntegerTensor& index, std::int64_t batch_dims,
               std::int64_t mode, const Out& out) {
    TORCH_CHECK(batch_dims == 0, "the host NPU has batchDims 0 only, not ", batch_dims);
    TORCH_CHECK(mode == 0 || mode == 1, "mode is ", mode, " instead of 0 or 1");
    const auto place = c10::maybe_wrap_dim(dim, x.dim());
    require_indices("index", index, x.size(place));
    auto sizes = x.sizes().vec();
    const auto rest = sizes.erase(sizes.begin() + place);
    sizes.insert(rest, index.sizes().begin(), index.sizes().end());
    out = at::index_select(x, place, index.flatten()).view(sizes);
}
const Formula<"aclnnGatherV3", gather_v3> rows_of_any_indices{
    {"self", kFloats | Dtypes{ACL_INT64, ACL_INT32, ACL_INT16, ACL_INT8, ACL_UINT8, ACL_BOOL, ACL_DOUBLE, ACL_COMPLEX64,
                              ACL_COMPLEX128}},
    {"index", kIndices},
    {"out", as("self")},
};

void index_add(const Tensor& x, std::int64_t dim, const IntegerTensor& index, const Tensor& source, const Number& alpha,
               std::int64_t, const Out& out) {
    out = x.index_add(dim, index.to(at::kLong), source, alpha.value);
}
const Formula<"aclnnIndexAddV2", index_add> rows_added_at_indices;

// Sums the gradients of each element's repetitions.
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

void bce_with_logits(const Tensor& x, const Tensor& target, const OptionalTensor& weight,
                     const OptionalTensor& pos_weight, std::int64_t reduction, const Out& out) {
    out = at::binary_cross_entropy_with_logits(x, target, weight, pos_weight, reduction);
}
const Formula<"aclnnBinaryCrossEntropyWithLogits", bce_with_logits> cross_entropy_of_logits;

// The divisor of a mean.
double divisor(const Tensor& each, std::int64_t reduction) {
    return reduction == at::Reduction::Mean ? static_cast<double>(each.numel()) : 1;
}

void bce_with_logits_grad(const Tensor& grad, const Tensor& x, const Tensor& target, const OptionalTensor& weight,
                          const OptionalTensor& pos_weight, std::int64_t reduction, const Out& out) {
    const auto s = at::sigmoid(x);
    // The derivative of -p t log s - (1 - t) log (1 - s) is s (p t + 1 - t) - p t.
    const auto positive = pos_weight ? *pos_weight * target : Tensor(target);
    auto each = (s * (positive + 1 - target) - positive) * grad;
    if (weight) each = each * *weight;
    out = each / divisor(each, reduction);
}
const Formula<"aclnnBinaryCrossEntropyWithLogitsBackward", bce_with_logits_grad> cross_entropy_of_logits_derivative;

// A divergence also has the batch mean (3).
double divisor_of_divergence(const Tensor& each, std::int64_t reduction) {
    if (reduction == 3) return static_cast<double>(each.dim() == 0 ? 1 : each.size(0));
    return divisor(each, reduction);
}

void kl_div_grad(const Tensor& grad, const Tensor& x, const Tensor& target, std::int64_t reduction, bool is_log,
                 const Out& out) {
    const auto of_target = -(is_log ? target.exp() : target) * grad;
    const auto inside = is_log ? of_target : of_target.masked_fill(target.le(0), 0);
    const auto each = inside.expand(at::infer_size(inside.sizes(), x.sizes()));
    out = (each / divisor_of_divergence(each, reduction)).sum_to_size(x.sizes());
}
const Formula<"aclnnKlDivBackward", kl_div_grad> divergence_derivative;

void kl_div_target_grad(const Tensor& grad, const Tensor& x, const Tensor& target, std::int64_t reduction, bool is_log,
                        const Out& out) {
    // t (log t - x), or exp(t) (t - x); 0 where t is 0.
    const auto each = is_log ? target.exp() * (target - x + 1) : target.log() - x + 1;
    const auto inside = is_log ? each : each.masked_fill(target.eq(0), 0);
    out = inside * grad / divisor_of_divergence(inside, reduction);
}
const Formula<"aclnnKlDivTargetBackward", kl_div_target_grad> divergence_derivative_of_target;

void l1_loss(const Tensor& x, const Tensor& target, std::int64_t reduction, const Out& out) {
    out = at::l1_loss(x, target, reduction);
}
const Formula<"aclnnL1Loss", l1_loss> absolute_error;

void l1_loss_grad(const Tensor& grad, const Tensor& x, const Tensor& target, std::int64_t reduction, const Out& out) {
    const auto each = (x - target).sign() * grad;
    out = each / divisor(each, reduction);
}
const Formula<"aclnnL1LossBackward", l1_loss_grad> absolute_error_derivative;

}  // namespace
}  // namespace host_npu
