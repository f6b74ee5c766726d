// CrossEntropyLoss and its gradient, without zloss, which CANN does not support either.
#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

void check_options(const std::string& reduction, double smoothing, double zloss, bool with_zloss) {
    TORCH_CHECK(zloss == 0 && !with_zloss,
                "CANN does not support zloss in CrossEntropyLoss: lseSquareScaleForZloss is ", zloss,
                " instead of 0, or returnZloss is true");
    TORCH_CHECK(smoothing >= 0 && smoothing <= 1, "labelSmoothing is ", smoothing, " instead of a number from 0 to 1");
    TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", "the reduction is ", reduction,
                " instead of mean, sum or none");
}

// Each row's column, whether it counts (1 or 0) and its column's weight; and the weights of all columns.
struct Targets {
    Tensor columns, counted, weights, all;
};

Targets targets(const IntegerTensor& target, const OptionalTensor& weight, std::int64_t ignored, const Tensor& like) {
    const auto wide = target.to(at::kLong);
    const auto is_counted = wide.ne(ignored);
    const auto columns = wide.masked_fill(is_counted.logical_not(), 0);
    const auto counted = is_counted.to(like.scalar_type());
    if (!weight) return {columns.unsqueeze(-1), counted, counted, at::ones({like.size(-1)}, like.options())};
    return {columns.unsqueeze(-1), counted, counted * weight->index({columns}), *weight};
}

void cross_entropy(const Tensor& x, const IntegerTensor& target, const OptionalTensor& weight,
                   const std::string& reduction, std::int64_t ignored, double smoothing, double zloss, bool with_zloss,
                   const Out& loss, const Out& log_prob, const OptionalOut&, const OptionalOut&) {
    check_options(reduction, smoothing, zloss, with_zloss);
    const auto logs = at::log_softmax(x, -1);
    const auto [columns, counted, weights, all] = targets(target, weight, ignored, x);
    auto each = -logs.gather(-1, columns).squeeze(-1) * weights;
    if (smoothing != 0) {  // mixes the target with the uniform distribution
        const auto uniform = -(logs * all).sum(-1) * counted / static_cast<double>(x.size(-1));
        each = each * (1 - smoothing) + uniform * smoothing;
    }
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

// The gradient and lse of zloss are ignored: callers pass them even without zloss.
void cross_entropy_grad(const Tensor& dloss, const Tensor& log_prob, const IntegerTensor& target,
                        const OptionalTensor& weight, const OptionalTensor&, const OptionalTensor&,
                        const std::string& reduction, std::int64_t ignored, double smoothing, double zloss,
                        const Out& dx) {
    check_options(reduction, smoothing, zloss, false);
    const auto [columns, counted, weights, all] = targets(target, weight, ignored, log_prob);
    const auto losses = reduction == "none" ? log_prob.size(0) : 1;
    TORCH_CHECK(dloss.numel() == losses, "gradLoss has shape ", dloss.sizes(), " instead of ", losses,
                " elements, those of the reduction ", reduction);
    const auto upstream = reduction == "mean" ? dloss / weights.sum() : dloss;
    const auto softmax = at::exp(log_prob);
    const auto wanted = at::ones_like(columns, log_prob.options());
    const auto of_target = softmax.scatter_add(-1, columns, -wanted) * (upstream * weights).unsqueeze(-1);
    if (smoothing == 0) {
        dx = of_target;
        return;
    }
    const auto share = smoothing / static_cast<double>(log_prob.size(-1));
    const auto of_all = (softmax * all.sum() - all) * (upstream * counted).unsqueeze(-1);
    dx = of_target * (1 - smoothing) + of_all * share;
}
const Formula<"aclnnCrossEntropyLossGrad", cross_entropy_grad> cross_entropy_backward{
    {"gradLoss", kFloats},           {"logProb", as("gradLoss"), "N C"},    {"target", kIndices, "N"},
    {"weightOptional", kFloat, "C"}, {"gradZlossOptional", as("gradLoss")}, {"lseForZlossOptional", as("gradLoss")},
    {"out", as("gradLoss"), "N C"},
};

}  // namespace
}  // namespace host_npu
