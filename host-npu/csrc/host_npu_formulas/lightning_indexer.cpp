// The lightning indexer: selects the keys with each query's largest scores for a sparse attention; and its gradients.
#include <limits>

#include "host_npu_formulas/sequence_layouts.h"

namespace host_npu {
namespace {

// A head's scores before their weight.
Tensor of_head(const Tensor& query, const Tensor& keys, std::int64_t head) {
    return at::relu(at::matmul(query.select(1, head), keys.t()));
}

// The scores of each query and key. With `causal`, aligned at the last tokens, later keys are masked.
Tensor scores_of(const Tensor& query, const Tensor& key, const Tensor& weights, bool causal) {
    const auto keys = key.select(1, 0);
    auto scores = at::zeros({query.size(0), keys.size(0)}, query.options());
    for (std::int64_t head = 0; head < query.size(1); ++head) {
        scores += of_head(query, keys, head) * weights.select(1, head).unsqueeze(1);
    }
    if (!causal) return scores;
    const auto own = at::arange(query.size(0)) + (key.size(0) - query.size(0));
    return scores.masked_fill(at::arange(key.size(0)) > own.unsqueeze(1), -std::numeric_limits<float>::infinity());
}

// As in CANN's kernels, missing keys have the index -1 and the score -inf.
void index_keys(const Tensor& query, const Tensor& key, const Tensor& weights, const OptionalIntegerTensor& queries,
                const OptionalIntegerTensor& keys, const OptionalIntegerTensor& table, const std::string& layout,
                const std::string& layout_of_keys, std::int64_t most, std::int64_t mode, std::int64_t before,
                std::int64_t after, bool with_scores, const Out& indices, const OptionalOut& values) {
    const Sequences of_queries{query, layout, queries}, of_keys{key, layout_of_keys, keys, table};
    TORCH_CHECK(!with_scores || layout_of_keys != "PA_BSND", "returnValues is not for the layout PA_BSND");
    require_sequences(of_queries, of_keys, "N<=64 128", "128");
    require_band(mode, before, after);
    require_shapes({{"query", query.sizes(), "...n *"}, {"weights", weights.sizes(), "...n"}});
    TORCH_CHECK((most >= 1 && most <= 2048) || (most <= 8192 && most % 1024 == 0 && most > 0), "sparseCount is ", most,
                "; CANN takes 1 to 2048, and the multiples of 1024 up to 8192");
    auto shape = query.sizes().vec();
    shape[shape.size() - 2] = 1;
    shape.back() = most;
    auto numbers = at::full(shape, -1, indices.in_place().options());
    auto largest = at::full(shape, -std::numeric_limits<float>::infinity());
    for (std::int64_t batch = 0; !query.is_meta() && batch < of_queries.count(); ++batch) {
        const auto found =
            scores_of(of_queries.of(query, batch), of_keys.of(key, batch), of_queries.of(weights, batch), mode == 3);
        const auto [sorted, order] = found.sort(/*stable=*/true, -1, /*descending=*/true);
        const auto top = sorted.slice(1, 0, most);
        const auto place = [&](const Tensor& x) {
            return of_queries.of(x, batch).select(1, 0).slice(1, 0, top.size(1));
        };
        place(numbers).copy_(order.slice(1, 0, most).masked_fill(top.isneginf(), -1));
        place(largest).copy_(top);
    }
    indices = numbers;
    if (with_scores && values) *values = largest;
}
const Formula<"aclnnLightningIndexer", index_keys> lightning_indexer{
    {"query", kHalves, "* * * | * * * *"},
    {"key", as("query"), "* * * | * * * *"},
    {"weights", as("query") | kFloat, "* * | * * *"},
    {"actualSeqLengthsQueryOptional", {ACL_INT32}, "*"},
    {"actualSeqLengthsKeyOptional", {ACL_INT32}, "*"},
    {"blockTableOptional", {ACL_INT32}, "* *"},
    {"sparseIndicesOut", {ACL_INT32}, "* 1 * | * * 1 *"},
    {"sparseValuesOut", as("query")},
};

// Adds the gradients of one sequence.
void add_gradients(const Tensor& query, const Tensor& keys, const Tensor& weights, const Tensor& of_scores,
                   const Tensor& dq, const Tensor& dk, const Tensor& dw) {
    for (std::int64_t head = 0; head < query.size(1); ++head) {
        const auto scores = of_head(query, keys, head);
        const auto through = (of_scores * weights.select(1, head).unsqueeze(1)).masked_fill(scores.le(0), 0);
        dw.select(1, head).add_((scores * of_scores).sum(1));
        dq.select(1, head).add_(at::matmul(through, keys));
        dk.add_(at::matmul(through.t(), query.select(1, head)));
    }
}

void index_keys_grad(const Tensor& query, const Tensor& key, const Tensor& dy, const IntegerTensor& indices,
                     const Tensor& weights, const OptionalIntegerTensor& queries, const OptionalIntegerTensor& keys,
                     std::int64_t, const std::string& layout, std::int64_t mode, std::int64_t, std::int64_t, bool,
                     const Out& dq, const Out& dk, const Out& dw) {
    const Sequences of_queries{query, layout, queries}, of_keys{key, layout, keys};
    require_sequences(of_queries, of_keys, "N<=64 128", "128");
    TORCH_CHECK(mode == 0 || mode == 3, "sparseMode is ", mode, "; CANN takes 0 or 3");
    TORCH_CHECK(dy.numel() == indices.numel(), "dy has shape ", dy.sizes(), " for indices of shape ", indices.sizes());
    const auto to_query = at::zeros_like(query), to_key = at::zeros_like(key), to_weights = at::zeros_like(weights);
    for (std::int64_t batch = 0; !query.is_meta() && batch < of_queries.count(); ++batch) {
        const auto of = [&](const Tensor& x) { return of_queries.of(x, batch); };
        const auto own = of_keys.of(key, batch).select(1, 0), to_own = of_keys.of(to_key, batch).select(1, 0);
        const auto numbers = of(indices).flatten(1).to(at::kLong);
        const auto given = of(dy).flatten(1).masked_fill(numbers.lt(0), 0);
        const auto of_scores = at::zeros({numbers.size(0), own.size(0)}, query.options());
        of_scores.scatter_add_(1, numbers.clamp_min(0), given);
        add_gradients(of(query), own, of(weights), of_scores, of(to_query), to_own, of(to_weights));
    }
    dq = to_query;
    dk = to_key;
    dw = to_weights;
}
const Formula<"aclnnLightningIndexerGrad", index_keys_grad> lightning_indexer_grad{
    {"query", kHalves, "* * * | * * * *"},
    {"key", as("query"), "* * * | * * * *"},
    {"dy", as("query")},
    {"sparseIndices", {ACL_INT32}},
    {"weights", as("query"), "* * | * * *"},
    {"actualSeqQLenOptional", {ACL_INT32}, "*"},
    {"actualSeqKvLenOptional", {ACL_INT32}, "*"},
    {"dqOut", as("query")},
    {"dkOut", as("query")},
    {"dweightsOut", as("query")},
};

}  // namespace
}  // namespace host_npu
