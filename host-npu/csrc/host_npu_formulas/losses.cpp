// CrossEntropyLoss and its gradient, without label smoothing and zloss.
#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/ones_like.h>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

void require_plain(const std::string& reduction, double smoothing, double zloss) {
    TORCH_CHECK(smoothing == 0 && zloss == 0,
                "the host NPU computes CrossEntropyLoss without label smoothing and zloss");
    TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", "the reduction is ", reduction,
                " instead of mean, sum or none");
}

// Each row's column, and its weight, which is 0 where it is ignored.
struct Targets {
    Tensor columns, weights;
};

Targets targets(const IntegerTensor& target, const OptionalTensor& weight, std::int64_t ignored, const Tensor& like) {
    const auto wide = target.to(at::kLong);
    const auto counted = wide.ne(ignored);
    const auto columns = wide.masked_fill(counted.logical_not(), 0);
    const auto weights = counted.to(like.scalar_type());
    return {columns.unsqueeze(-1), weight ? weights * weight->index({columns}) : weights};
}

void cross_entropy(const Tensor& x, const IntegerTensor& target, const OptionalTensor& weight,
                   const std::string& reduction, std::int64_t ignored, double smoothing, double zloss, bool with_zloss,
                   const Out& loss, const Out& log_prob, const OptionalOut&, const OptionalOut&) {
    require_plain(reduction, smoothing, zloss);
    TORCH_CHECK(!with_zloss, "the host NPU computes CrossEntropyLoss without label smoothing and zloss");
    const auto logs = at::log_softmax(x, -1);
    const auto [columns, weights] = targets(target, weight, ignored, x);
    const auto each = -logs.gather(-1, columns).squeeze(-1) * weights;
    log_prob = logs;
    if (reduction == "none") {
        loss = each;
    } else {
        loss = (reduction == "sum" ? each.sum() : each.sum() / weights.sum()).view(loss.sizes());
    }
}
const Formula<"aclnnCrossEntropyLoss", cross_entropy> cross_entropy_forward{
    {"input", kFloats, "N C"},         {"target", kIndices, "N"},          {"weightOptional", kFloat, "C"},
    {"lossOut", as("input"), "1 | N"}, {"logProbOut", as("input"), "N C"}, {"zlossOut", as("input")},
    {"lseForZlossOut", as("input")},
};

// The gradient and lse of zloss are ignored: callers pass them even if zloss has no scale.
void cross_entropy_grad(const Tensor& dloss, const Tensor& log_prob, const IntegerTensor& target,
                        const OptionalTensor& weight, const OptionalTensor&, const OptionalTensor&,
                        const std::string& reduction, std::int64_t ignored, double smoothing, double zloss,
                        const Out& dx) {
    require_plain(reduction, smoothing, zloss);
    const auto [columns, weights] = targets(target, weight, ignored, log_prob);
    const auto losses = reduction == "none" ? log_prob.size(0) : 1;
    TORCH_CHECK(dloss.numel() == losses, "gradLoss has shape ", dloss.sizes(), " instead of ", losses,
                " elements, those of the reduction ", reduction);
    const auto rows = dloss * (reduction == "mean" ? weights / weights.sum() : weights);
    const auto wanted = at::ones_like(columns, log_prob.options());
    dx = (at::exp(log_prob).scatter_add(-1, columns, -wanted)) * rows.unsqueeze(-1);
}
const Formula<"aclnnCrossEntropyLossGrad", cross_entropy_grad> cross_entropy_backward{
    {"gradLoss", kFloats},           {"logProb", as("gradLoss"), "N C"},    {"target", kIndices, "N"},
    {"weightOptional", kFloat, "C"}, {"gradZlossOptional", as("gradLoss")}, {"lseForZlossOptional", as("gradLoss")},
    {"out", as("gradLoss"), "N C"},
};

}  // namespace
}  // namespace host_npu
