// Mixtures of experts: the choice of experts for each token, and their weights.
#include <limits>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// The k largest values of each row and their indices. Ties are in index order, unlike in at::topk.
std::pair<Tensor, Tensor> largest(const Tensor& x, std::int64_t k) {
    TORCH_CHECK(k > 0 && k <= x.size(-1), "k is ", k, "; it must be 1 to ", x.size(-1), ", the number of experts");
    const auto [values, indices] = at::sort(x, /*stable=*/true, /*dim=*/-1, /*descending=*/true);
    return {values.narrow(-1, 0, k), indices.narrow(-1, 0, k)};
}

// Rows that are finished choose no expert: their indices are the number of experts.
Tensor of_unfinished(const Tensor& chosen, const OptionalIntegerTensor& finished, const Tensor& x) {
    if (!finished) return chosen;
    const auto rows = x.sizes().slice(0, x.dim() - 1);
    TORCH_CHECK(finished->sizes() == rows, "finished has shape ", finished->sizes(),
                "; it must have that of the rows, ", rows);
    return chosen.masked_fill(finished->ne(0).unsqueeze(-1), x.size(-1));
}

void gating(const Tensor& x, const OptionalIntegerTensor& finished, std::int64_t k, const Out& weights,
            const Out& experts, const Out& rows) {
    const auto [values, indices] = largest(at::softmax(x, -1), k);
    weights = values;
    experts = of_unfinished(indices, finished, x);
    // Numbers the k-th choices of all tokens consecutively.
    const auto tokens = x.numel() / x.size(-1);
    rows = at::arange(tokens * k, indices.options()).view({k, tokens}).t().reshape(indices.sizes());
}
const Formula<"aclnnMoeGatingTopKSoftmax", gating> gating_of_tokens{
    {"x", kFloats, "N E | M N E"},
    {"finishedOptional", {ACL_BOOL}, "N | M N"},
    {"yOut", as("x"), "N K<=1024 | M N K<=1024"},
    {"expertIdxOut", {ACL_INT32}, "N K | M N K"},
    {"rowIdxOut", {ACL_INT32}, "N K | M N K"},
};

// With `renorm` 1, the softmax is over the chosen scores only.
void gating_v2(const Tensor& x, const OptionalIntegerTensor& finished, std::int64_t k, std::int64_t renorm,
               bool with_softmax, const Out& weights, const Out& experts, const OptionalOut& softmax_out) {
    TORCH_CHECK(renorm == 0 || renorm == 1, "renorm is ", renorm, " instead of 0 or 1");
    const auto softmax = at::softmax(x, -1);
    const auto [values, indices] = largest(renorm == 1 ? x : softmax, k);
    weights = renorm == 1 ? at::softmax(values, -1) : values;
    experts = of_unfinished(indices, finished, x);
    if (with_softmax && renorm == 0) *softmax_out = softmax;
}
const Formula<"aclnnMoeGatingTopKSoftmaxV2", gating_v2> gating_with_renorm{
    {"x", kFloats},
    {"finishedOptional", {ACL_BOOL}},
    {"yOut", kFloats},
    {"expertIdxOut", {ACL_INT32}},
    {"softmaxResultOutOptional", kFloat},
};

// Masks the experts of all but the best groups.
Tensor of_best_groups(const Tensor& scores, std::int64_t kept, std::int64_t groups, std::int64_t select_mode) {
    TORCH_CHECK(groups > 0 && scores.size(-1) % groups == 0, scores.size(-1), " experts are not group_count=", groups,
                " equal groups");
    TORCH_CHECK(kept > 0 && kept <= groups, "k_group is ", kept, " of ", groups, " groups");
    TORCH_CHECK(select_mode == 0 || select_mode == 1, "group_select_mode is ", select_mode, " instead of 0 or 1");
    if (groups == 1) return scores;
    const auto grouped = scores.unflatten(-1, {groups, -1});
    TORCH_CHECK(grouped.size(-1) > select_mode, "a group has ", grouped.size(-1),
                " experts, too few for group_select_mode ", select_mode);
    const auto best = select_mode == 0 ? grouped.amax(-1) : largest(grouped, 2).first.sum(-1);
    const auto chosen = largest(best, kept).second;
    const auto left_out = at::ones_like(best, at::kBool).scatter(-1, chosen, 0);
    return grouped.masked_fill(left_out.unsqueeze(-1), -std::numeric_limits<float>::infinity()).flatten(-2);
}

constexpr std::int64_t kSoftmax = 0;
constexpr std::int64_t kSigmoid = 1;
constexpr std::int64_t kSoftplus = 2;

bool is_normalized(std::int64_t renorm, std::int64_t norm_type) {
    TORCH_CHECK(renorm == 0 || renorm == 1, "renorm is ", renorm, " instead of 0 or 1");
    return norm_type != kSoftmax || renorm == 1;
}

// The bias affects the choice, not the weights. The norm is returned for the gradient.
void gating_in_groups(const Tensor& x, const OptionalTensor& bias, std::int64_t k, std::int64_t k_group,
                      std::int64_t group_count, std::int64_t group_select_mode, std::int64_t renorm,
                      std::int64_t norm_type, bool with_norm, double scale, double epsilon, const Out& weights,
                      const Out& experts, const OptionalOut& norm_out) {
    const auto divides = is_normalized(renorm, norm_type);
    TORCH_CHECK(norm_type == kSoftmax || norm_type == kSigmoid || (norm_type == kSoftplus && group_count == 1),
                "norm_type is ", norm_type, " of ", group_count, " groups; CANN takes 0, 1, and 2 of one group");
    const auto norm = norm_type == kSigmoid    ? at::sigmoid(x)
                      : norm_type == kSoftplus ? at::softplus(x).sqrt()
                                               : at::softmax(x, -1);
    const auto scores = of_best_groups(bias ? norm + *bias : norm, k_group, group_count, group_select_mode);
    TORCH_CHECK(k > 0 && k <= x.size(-1) / group_count * k_group, "k is ", k, " of ",
                x.size(-1) / group_count * k_group, " experts");
    const auto chosen = largest(scores, k).second;
    const auto values = norm.gather(-1, chosen);
    weights = (divides ? values / (values.sum(-1, true) + epsilon) : values) * scale;
    experts = chosen;
    if (with_norm) *norm_out = norm;
}
const TensorRules kGating{{"x", kFloats, "N E<=2048"},
                          {"biasOptional", as("x"), "E"},
                          {"yOut", as("x"), "N K"},
                          {"expertIdxOut", {ACL_INT32}, "N K"},
                          {"outOut", kFloat}};
const Formula<"aclnnMoeGatingTopK", gating_in_groups> gating_of_groups{kGating};

void gating_in_groups_v2(const Tensor& x, const OptionalTensor& bias, Without<"input_ids">, Without<"tid2eid">,
                         std::int64_t k, std::int64_t k_group, std::int64_t group_count, std::int64_t group_select_mode,
                         std::int64_t renorm, std::int64_t norm_type, bool with_norm, double scale, double epsilon,
                         const Out& weights, const Out& experts, const OptionalOut& norm_out) {
    gating_in_groups(x, bias, k, k_group, group_count, group_select_mode, renorm, norm_type, with_norm, scale, epsilon,
                     weights, experts, norm_out);
}
const Formula<"aclnnMoeGatingTopKV2", gating_in_groups_v2> gating_of_groups_v2{kGating};

void gating_grad(const Tensor& norm, const Tensor& dweights, const IntegerTensor& experts, std::int64_t renorm,
                 std::int64_t norm_type, double scale, double epsilon, const Out& dx) {
    TORCH_CHECK(norm_type == kSoftmax || norm_type == kSigmoid, "norm_type is ", norm_type, " instead of 0 or 1");
    const auto chosen = experts.to(at::kLong);
    auto dvalues = dweights * scale;
    if (is_normalized(renorm, norm_type)) {
        // The derivative of v / (sum v + epsilon).
        const auto values = norm.gather(-1, chosen);
        const auto sum = values.sum(-1, true) + epsilon;
        dvalues = (dvalues - (dvalues * values).sum(-1, true) / sum) / sum;
    }
    const auto dnorm = at::zeros_like(norm).scatter_add(-1, chosen, dvalues);
    dx = norm_type == kSigmoid ? dnorm * norm * (1 - norm) : norm * (dnorm - (dnorm * norm).sum(-1, true));
}
const Formula<"aclnnMoeGatingTopKBackward", gating_grad> gating_backward;

// Selects an instance of each chosen expert. A row of the table has the count of instances followed by the instances,
// which ranks or tokens use in turn. The threshold of an active choice is a fraction of the sum of the token's scales.
void update_expert(const IntegerTensor& experts, const IntegerTensor& table, const OptionalTensor& scales,
                   const OptionalTensor& threshold, const OptionalIntegerTensor& active, std::int64_t rank,
                   std::int64_t ranks, std::int64_t mode, const Out& balanced, const Out& balanced_active) {
    TORCH_CHECK(mode == 0 || mode == 1, "balanceMode is ", mode, " instead of 0 or 1");
    TORCH_CHECK(mode == 1 || (ranks >= 2 && ranks <= 768 && rank >= 0 && rank < ranks), "localRankId is ", rank, " of ",
                ranks, " ranks; CANN takes 2 to 768");
    TORCH_CHECK(scales.has_value() == threshold.has_value() && (scales || !active),
                "expertScales and pruningThreshold must be given together, and with activeMask");
    require_indices("expertIds", experts, table.size(0));
    const auto rows = table.to(at::kLong).index({experts.to(at::kLong)});
    const auto count = rows.select(-1, 0);
    const auto tokens = at::arange(experts.size(0), count.options()).unsqueeze(1);
    const auto place = mode == 0 ? at::full_like(count, rank).div((count + (ranks - 1)).div(count, "trunc"), "trunc")
                                 : tokens.remainder(count);
    balanced = rows.gather(-1, (place + 1).unsqueeze(-1)).squeeze(-1);
    if (!scales) return;
    const auto kept = scales->lt(*threshold * scales->sum(-1, true)).logical_not();
    balanced_active = active ? kept.logical_and(active->unsqueeze(-1)) : kept;
}
const Formula<"aclnnMoeUpdateExpert", update_expert> instances_of_experts{
    {"expertIds", kIndices, "S<=512 K<=16"},   {"eplbTable", {ACL_INT32}, "E<=1024 F"},
    {"expertScalesOptional", kFloats, "S K"},  {"pruningThresholdOptional", kFloat, "K | 1 K"},
    {"activeMaskOptional", {ACL_BOOL}, "S"},   {"balancedExpertIds", as("expertIds"), "S K"},
    {"balancedActiveMask", {ACL_BOOL}, "S K"},
};

}  // namespace
}  // namespace host_npu
