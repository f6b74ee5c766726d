// Mixtures of experts routed by a map of tokens to experts.
#include "host_npu_formulas/experts.h"

namespace host_npu {
namespace {

using Ints = std::vector<std::int64_t>;

// The rows of a routing map, ordered by expert: their positions in the transposed map, and their tokens. With a
// capacity, all experts have the same number of rows, the assigned tokens first.
struct Rows {
    Tensor places, tokens;
    std::int64_t experts, of_tokens;

    Rows(const IntegerTensor& map, std::int64_t rows, bool padded) {
        TORCH_CHECK(map.dim() == 2, "routing_map has ", map.dim(), " dimensions instead of 2");
        of_tokens = map.size(0);
        experts = map.size(1);
        const auto by_expert = map.ne(0).t().to(at::kByte);
        if (padded) {
            TORCH_CHECK(experts > 0 && rows % experts == 0, rows, " rows cannot be divided evenly among ", experts,
                        " experts");
            tokens = stable_order(by_expert, true).slice(1, 0, rows / experts).flatten();
            const auto expert = at::arange(experts, tokens.options()).repeat_interleave(rows / experts);
            places = expert * of_tokens + tokens;
            return;
        }
        TORCH_CHECK(of_tokens > 0 && rows % of_tokens == 0, rows, " rows cannot be divided evenly among ", of_tokens,
                    " tokens");
        TORCH_CHECK(map.is_meta() || by_expert.sum().item<std::int64_t>() == rows, "routing_map does not have ", rows,
                    " ones");
        places = stable_order(by_expert.flatten(), true).slice(0, 0, rows);
        tokens = places.remainder(of_tokens);
    }

    // From the row indices `index` and their tokens, with a capacity.
    Rows(const Tensor& index, const Tensor& tokens, const Tensor& map) : tokens(tokens) {
        TORCH_CHECK(map.dim() == 2 && map.size(1) > 0 && index.size(0) % map.size(1) == 0, "a map has shape ",
                    map.sizes(), " for ", index.size(0), " rows, as many of each expert");
        of_tokens = map.size(0);
        experts = map.size(1);
        places = index.div(std::max<std::int64_t>(index.size(0) / experts, 1), "trunc") * of_tokens + tokens;
    }

    // Gathers the values of a map at these rows; in_map scatters them back.
    Tensor of_map(const Tensor& values) const {
        TORCH_CHECK(values.sizes() == at::IntArrayRef({of_tokens, experts}), "probs has shape ", values.sizes(),
                    " instead of routing_map's [", of_tokens, ", ", experts, "]");
        return values.t().flatten().index({places});
    }
    Tensor in_map(const Tensor& values) const {
        TORCH_CHECK(values.sizes() == places.sizes(), "the gradient of the probs of rows has shape ", values.sizes(),
                    " instead of ", places.sizes());
        return at::zeros({experts * of_tokens}, values.options())
            .scatter_add(0, places, values)
            .view({experts, of_tokens})
            .t();
    }
};

// Sums the rows of each token.
Tensor sums_of_tokens(const Tensor& rows, const Tensor& tokens, std::int64_t count) {
    return at::zeros({count, rows.size(1)}, rows.options()).index_add(0, tokens, rows);
}

void map_permute(const AnyTensor& tokens, const IntegerTensor& map, const OptionalAnyTensor& probs, std::int64_t,
                 bool padded, const Out& permuted, const OptionalOut& permuted_probs, const Out& index) {
    const Rows rows(map, permuted.sizes()[0], padded);
    TORCH_CHECK(tokens.dim() == 2 && tokens.size(0) == rows.of_tokens, "tokens has shape ", tokens.sizes(),
                " instead of [", rows.of_tokens, ", *], a row for each of routing_map's");
    permuted = tokens.index({rows.tokens});
    if (probs && permuted_probs) *permuted_probs = rows.of_map(*probs);
    index = padded ? rows.tokens : stable_order(rows.tokens);
}
const Formula<"aclnnMoeTokenPermuteWithRoutingMap", map_permute> permute_by_map;

// The token of each row. Without a capacity, `index` has the rows by token; with a capacity, it has the tokens.
Tensor tokens_of_rows(const Tensor& index, const Tensor& order, std::int64_t tokens, bool padded) {
    if (padded) return index.index({order});
    return at::arange(index.size(0), index.options()).div(tokens == 0 ? 1 : index.size(0) / tokens, "trunc");
}

void map_permute_grad(const Tensor& dpermuted, const OptionalTensor& dprobs, const IntegerTensor& index,
                      const IntegerTensor& map, std::int64_t, std::int64_t tokens, bool padded, const Out& dtokens,
                      const OptionalOut& dprobs_out) {
    require_shapes({{"permutedTokenOutputGrad", dpermuted.sizes(), "A *"}, {"sortedIndices", index.sizes(), "A"}});
    require_indices("sortedIndices", index, padded ? tokens : index.numel());
    const auto wide = index.to(at::kLong);
    const auto order = padded ? stable_order(wide) : wide;
    dtokens = sums_of_tokens(dpermuted.index({order}), tokens_of_rows(wide, order, tokens, padded), tokens);
    if (!dprobs || !dprobs_out) return;
    const auto rows =
        padded ? Rows(at::arange(index.size(0), wide.options()), wide, map) : Rows(map, index.size(0), false);
    *dprobs_out = rows.in_map(*dprobs);
}
const Formula<"aclnnMoeTokenPermuteWithRoutingMapGrad", map_permute_grad> permute_by_map_backward;

// The rows at `order`, which belong to `tokens`. Without a capacity, a token's rows are ordered by expert.
Rows rows_in_order(const OptionalIntegerTensor& map, const Tensor& probs, const Tensor& order, const Tensor& tokens,
                   bool padded) {
    if (padded) return Rows(order, tokens, probs);
    TORCH_CHECK(map, "probs need a routing_map");
    Rows rows(*map, order.size(0), false);
    rows.places = rows.places.index({stable_order(rows.tokens)});
    return rows;
}

// Row `out_index[i]` belongs to token `token_of[i]`.
void map_unpermute(const Tensor& permuted, const IntegerTensor& index, const OptionalIntegerTensor& map,
                   const OptionalTensor& probs, bool padded, const Ints& shape, const Out& tokens, const Out& out_index,
                   const Out& token_of, const OptionalOut& permuted_probs) {
    TORCH_CHECK(shape.size() == 2 && tokens.sizes() == at::IntArrayRef(shape), "restore_shape is ",
                at::IntArrayRef(shape), ", the tokens have shape ", tokens.sizes());
    require_shapes({{"permutedTokens", permuted.sizes(), "A *"}, {"sortedIndices", index.sizes(), "A"}});
    require_indices("sortedIndices", index, padded ? shape[0] : permuted.size(0));
    const auto wide = index.to(at::kLong);
    const auto order = padded ? stable_order(wide) : wide;
    const auto of = tokens_of_rows(wide, order, shape[0], padded);
    out_index = order;
    token_of = of;
    auto rows = permuted.index({order});
    if (probs) {
        TORCH_CHECK(permuted_probs, "probs need an output of those of the rows");
        const auto weights = rows_in_order(map, *probs, order, of, padded).of_map(*probs);
        *permuted_probs = padded ? weights.index({stable_order(order)}) : weights;
        rows = rows * weights.unsqueeze(-1);
        // Without a capacity, CANN skips rows with weight 0, even if they contain NaN.
        if (!padded) rows = rows.masked_fill(weights.eq(0).unsqueeze(-1), 0);
    }
    tokens = sums_of_tokens(rows, of, shape[0]);
}
const Formula<"aclnnMoeTokenUnpermuteWithRoutingMap", map_unpermute> unpermute_by_map;

void map_unpermute_grad(const Tensor& dtokens, const IntegerTensor& out_index, const IntegerTensor& token_of,
                        const OptionalIntegerTensor& map, const OptionalTensor& permuted, const OptionalTensor& probs,
                        bool padded, const Ints&, const Out& dpermuted, const OptionalOut& dprobs) {
    require_indices("outIndex", out_index, out_index.numel());
    // Without a capacity, programs pass the sorted indices for both arguments.
    const auto order = out_index.to(at::kLong), places = stable_order(order);
    const auto of = padded ? token_of.to(at::kLong) : tokens_of_rows(order, order, dtokens.size(0), false);
    const auto grads = dtokens.index({of});
    if (!probs) {
        dpermuted = grads.index({places});
        return;
    }
    TORCH_CHECK(permuted && dprobs, "the gradient of probs needs permuted_tokens");
    const auto rows = rows_in_order(map, *probs, order, of, padded);
    *dprobs = rows.in_map((grads * permuted->index({order})).sum(-1));
    dpermuted = (grads * rows.of_map(*probs).unsqueeze(-1)).index({places});
}
const Formula<"aclnnMoeTokenUnpermuteWithRoutingMapGrad", map_unpermute_grad> unpermute_by_map_backward;

}  // namespace
}  // namespace host_npu
