// Mixtures of experts: permutes the tokens to the order of the experts, and back.
#include "host_npu_formulas/experts.h"

namespace host_npu {
namespace {

void require_unpadded(bool padded) { TORCH_CHECK(!padded, "the host NPU has no padded mode of permutations"); }

// Copies of the tokens, ordered by expert. `places` has the position of each copy.
void permute(const AnyTensor& tokens, const IntegerTensor& indices, std::int64_t kept, bool padded, const Out& permuted,
             const Out& places) {
    require_unpadded(padded);
    const auto choices = indices.dim() == 1 ? 1 : indices.size(1);
    const auto order = stable_order(indices.flatten());
    const auto rows = permuted.sizes()[0];
    // A negative number is minus the number of dropped copies.
    const auto all = order.numel(), wanted = kept > 0 ? std::min(kept, all) : std::max<std::int64_t>(all + kept, 0);
    TORCH_CHECK(rows == wanted, "permuteTokensOut has ", rows, " rows instead of ", wanted, ", of ", all,
                " copies with numOutTokens ", kept);
    permuted = tokens.index({order.slice(0, 0, rows).div(choices, "trunc")});
    places = stable_order(order);
}
const Formula<"aclnnMoeTokenPermute", permute> permute_tokens{
    {"tokens", kFloats | Dtypes{ACL_INT8}, "T H"},
    {"indices", kIndices, "T K<=512 | T"},
    {"permuteTokensOut", as("tokens"), "* H"},
    {"sortedIndicesOut", {ACL_INT32}, "*"},
};

// There is a place for each copy, including dropped ones.
void require_places(const Tensor& places) { require_indices("sortedIndices", places, places.numel()); }

// The rows at `places`; 0 for places past the end.
Tensor rows_at(const Tensor& rows, const Tensor& places) {
    TORCH_CHECK(rows.size(0) <= places.numel(), "there are ", rows.size(0), " rows for sortedIndices of shape ",
                places.sizes(), "; CANN takes at most as many");
    require_places(places);
    const auto wide = places.to(at::kLong).flatten();
    const auto there = wide.lt(rows.size(0));
    return rows.index({wide.clamp_max(rows.size(0) - 1)}).masked_fill(there.logical_not().unsqueeze(-1), 0);
}

void permute_grad(const Tensor& dpermuted, const IntegerTensor& places, std::int64_t choices, bool padded,
                  const Out& dtokens) {
    require_unpadded(padded);
    dtokens = rows_at(dpermuted, places).unflatten(0, {-1, choices}).sum(1);
}
const Formula<"aclnnMoeTokenPermuteGrad", permute_grad> permute_tokens_backward{
    {"permutedOutputGrad", kFloats, "* H"},
    {"sortedIndices", {ACL_INT32}, "*"},
    {"out", kFloats, "* H"},
};

using Ints = std::vector<std::int64_t>;

void require_choices(const Tensor& places, const Tensor& weights) {
    TORCH_CHECK(places.numel() == weights.numel(), "sortedIndices has shape ", places.sizes(),
                " instead of a number for each of probs, of shape ", weights.sizes());
}

void unpermute(const Tensor& permuted, const IntegerTensor& places, const OptionalTensor& weights, bool padded,
               const Ints&, const Out& tokens) {
    require_unpadded(padded);
    if (weights) require_choices(places, *weights);
    auto rows = rows_at(permuted, places);
    if (weights) {
        // CANN skips rows with weight 0, even if they contain NaN.
        const auto of_rows = weights->unsqueeze(-1);
        rows = (rows.unflatten(0, {-1, weights->size(-1)}) * of_rows).masked_fill(of_rows.eq(0), 0).sum(1);
    }
    tokens = rows;
}
const Formula<"aclnnMoeTokenUnpermute", unpermute> unpermute_tokens{
    {"permutedTokens", kFloats, "* H"},
    {"sortedIndices", {ACL_INT32}, "*"},
    {"probsOptional", kFloats, "T K<=512"},
    {"out", as("permutedTokens"), "T H"},
};

void unpermute_grad(const OptionalTensor& permuted, const Tensor& dtokens, const IntegerTensor& places,
                    const OptionalTensor& weights, bool padded, const Ints&, const Out& dpermuted,
                    const OptionalOut& dweights) {
    require_unpadded(padded);
    const auto choices = weights ? weights->size(-1) : 1;
    if (weights) require_choices(places, *weights);
    TORCH_CHECK(!permuted || permuted->sizes() == dpermuted.sizes(), "permutedTokens has shape ",
                permuted ? permuted->sizes() : at::IntArrayRef(), " instead of that of its gradient, ",
                dpermuted.sizes());
    require_places(places);
    const auto wide = places.to(at::kLong);
    const auto copies = dtokens.unsqueeze(1).expand({-1, choices, -1});
    const auto grads = (weights ? copies * weights->unsqueeze(-1) : copies).flatten(0, 1);
    // The places are a permutation: its inverse gives the copies in the order of the rows.
    dpermuted = grads.index({stable_order(wide).slice(0, 0, dpermuted.sizes()[0])});
    if (weights && dweights) {
        TORCH_CHECK(permuted, "the gradient of the weights needs the permuted tokens");
        *dweights = (rows_at(*permuted, places).unflatten(0, {-1, choices}) * dtokens.unsqueeze(1)).sum(-1);
    }
}
const Formula<"aclnnMoeTokenUnpermuteGrad", unpermute_grad> unpermute_tokens_backward{
    {"permutedTokensOptional", kFloats, "* H"}, {"unpermutedTokensGrad", kFloats, "T H"},
    {"sortedIndices", {ACL_INT32}, "*"},        {"probsOptional", kFloats, "T K<=512"},
    {"permutedTokensGradOut", kFloats, "* H"},  {"probsGradOut", kFloats, "T K |"},
};

}  // namespace
}  // namespace host_npu
