// Batch norm in steps, between which ranks exchange statistics. Channels are dimension 1.
#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// Views x as [channels, other elements].
Tensor per_channel(const Tensor& x) {
    TORCH_CHECK(x.dim() >= 2, "shape ", x.sizes(), " has no channels");
    return x.transpose(0, 1).flatten(1);
}

Tensor beside(const Tensor& channels, const Tensor& x) {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
    sizes[1] = -1;
    return channels.view(sizes);
}

void stats(const Tensor& x, double epsilon, const Out& mean, const Out& invstd) {
    const auto rows = per_channel(x);
    mean = rows.mean(1);
    invstd = at::rsqrt(rows.var(1, /*unbiased=*/false) + epsilon);
}
const Formula<"aclnnBatchNormStats", stats> stats_of_batch_norm{
    {"input", kFloats, "N C ..."}, {"mean", kFloat, "C"}, {"invstd", kFloat, "C"}};

void elemt(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
           const Tensor& invstd, double, const Out& out) {
    auto y = (x - beside(mean, x)) * beside(invstd, x);
    if (weight) y = y * beside(*weight, x);
    if (bias) y = y + beside(*bias, x);
    out = y;
}
// CANN's document requires the input's dtype for all of them; its code does not: under autocast they are float32.
const Formula<"aclnnBatchNormElemt", elemt> elements_of_batch_norm{
    {"input", kFloats, "N C ...x"}, {"weight", kFloats, "C"}, {"bias", kFloats, "C"},
    {"mean", kFloats, "C"},         {"invstd", kFloats, "C"}, {"output", as("input"), "N C ...x"},
};

struct Running {
    OptionalOut mean;
    OptionalOut variance;
    double momentum;

    // The running variance is the unbiased one.
    void take(const Tensor& batch_mean, const Tensor& batch_variance, const Tensor& count) const {
        if (mean) *mean = mean->rounded() * (1 - momentum) + batch_mean * momentum;
        const auto unbiased = batch_variance * (count / (count - 1));
        if (variance) *variance = variance->rounded() * (1 - momentum) + unbiased * momentum;
    }
};

// Combines each rank's `means` and `invstds`, weighted by `counts`.
void gather_stats(const Tensor&, const Tensor& means, const Tensor& invstds, const OptionalOut& running_mean,
                  const OptionalOut& running_variance, double momentum, double epsilon, const Tensor& counts,
                  const Out& mean, const Out& invstd) {
    const auto count = counts.sum();
    const auto shares = counts.flatten().unsqueeze(-1) / count;
    const auto together = (means * shares).sum(0);
    const auto variances = invstds.pow(-2) - epsilon;
    const auto variance = ((variances + (means - together).square()) * shares).sum(0);
    mean = together;
    invstd = at::rsqrt(variance + epsilon);
    Running{running_mean, running_variance, momentum}.take(together, variance, count);
}
const Formula<"aclnnBatchNormGatherStatsWithCounts", gather_stats> gathered_stats_of_batch_norm{
    {"input", kFloats, "N C ..."}, {"mean", kFloats, "R C"}, {"invstd", kFloats, "R C"}, {"runningMean", kFloats, "C"},
    {"runningVar", kFloats, "C"},  {"counts", kFloats, "R"}, {"meanAll", kFloats, "C"},  {"invstdAll", kFloats, "C"},
};

// Combines each rank's sums and sums of squares.
void gather_sums(const Tensor& sums, const Tensor& squares, const AnyTensor& counts, const Out& running_mean,
                 const Out& running_variance, float momentum, float epsilon, const Out& mean, const Out& invstd) {
    const auto count = counts.to(at::kDouble).sum().to(at::kFloat);
    const auto together = sums.sum(0) / count;
    const auto variance = squares.sum(0) / count - together.square();
    mean = together;
    invstd = at::rsqrt(variance + epsilon);
    Running{running_mean, running_variance, momentum}.take(together, variance, count);
}
const Formula<"aclnnSyncBatchNormGatherStats", gather_sums> gathered_sums_of_batch_norm{
    {"totalSum", kFloats, "R C"},
    {"totalSquareSum", kFloats, "R C"},
    {"sampleCount", kFloats | Dtypes{ACL_INT32}, "R"},
    {"mean", kFloats, "C"},
    {"variance", kFloats, "C"},
    {"batchMean", kFloats, "C"},
    {"batchInvstd", kFloats, "C"},
};

void reduce_grad(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& invstd, const OptionalTensor&,
                 bool input_wanted, bool weight_wanted, bool bias_wanted, const OptionalOut& sum_dy,
                 const OptionalOut& sum_dy_xmu, const OptionalOut& dweight, const OptionalOut& dbias) {
    const auto rows = per_channel(dy);
    const auto total = rows.sum(1);
    const auto product = (rows * per_channel(x - beside(mean, x))).sum(1);
    if (input_wanted && sum_dy) *sum_dy = total;
    if (input_wanted && sum_dy_xmu) *sum_dy_xmu = product;
    if (weight_wanted && dweight) *dweight = product * invstd;
    if (bias_wanted && dbias) *dbias = total;
}
const Formula<"aclnnBatchNormReduceBackward", reduce_grad> reduction_of_batch_norm_backward{
    {"gradOut", as("input"), "N C ...x"},
    {"input", kFloats, "N C ...x"},
    {"mean", kFloats, "C"},
    {"invstd", kFloats, "C"},
    {"weight", kFloats, "C"},
    {"sumDy", kFloats, "C"},
    {"sumDyXmu", kFloats, "C"},
    {"gradWeight", kFloats, "C"},
    {"gradBias", kFloats, "C"},
};

void elemt_grad(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& invstd,
                const OptionalTensor& weight, const Tensor& sum_dy, const Tensor& sum_dy_xmu,
                const IntegerTensor& counts, const Out& dx) {
    const auto count = counts.sum().to(at::kFloat);
    const auto slope = beside(sum_dy_xmu / count * invstd.square(), x);
    auto scale = beside(invstd, x);
    if (weight) scale = scale * beside(*weight, x);
    dx = (dy - beside(sum_dy / count, x) - (x - beside(mean, x)) * slope) * scale;
}
const Formula<"aclnnBatchNormElemtBackward", elemt_grad> elements_of_batch_norm_backward{
    {"gradOut", kFloats, "N C ...x"},
    {"input", kFloats, "N C ...x"},
    {"mean", kFloats, "C"},
    {"invstd", kFloats, "C"},
    {"weight", kFloats, "C"},
    {"sumDy", kFloats, "C"},
    {"sumDyXmu", kFloats, "C"},
    {"counter", {ACL_INT32, ACL_FLOAT, ACL_FLOAT16}},
    {"gradInput", kFloats, "N C ...x"},
};

void reduce(const Tensor& x, const Out& sum, const Out& sum_of_squares) {
    const auto rows = per_channel(x);
    sum = rows.sum(1);
    sum_of_squares = rows.square().sum(1);
}
const Formula<"aclnnBatchNormReduce", reduce> reduction_of_batch_norm{
    {"x", kFloats, "N C H W"},
    {"sum", kFloat, "C"},
    {"squareSum", kFloat, "C"},
};

}  // namespace
}  // namespace host_npu
