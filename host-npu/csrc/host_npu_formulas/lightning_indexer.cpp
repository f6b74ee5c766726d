// The keys that a sparse attention looks at: those of each query's largest scores; and the gradients of these.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <string>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

constexpr auto kNoBand = std::numeric_limits<std::int64_t>::max();

// Sequences in the layouts BSND, TND and PA_BSND, which has its tokens in the blocks of a table.
struct Sequences {
    const Tensor& tokens;
    const std::string& layout;
    const OptionalIntegerTensor& lengths;
    OptionalIntegerTensor table = std::nullopt;

    // Where the rows of a sequence begin, and how many there are.
    std::pair<std::int64_t, std::int64_t> rows(std::int64_t number) const {
        const auto length = [&](std::int64_t at) { return (*lengths)[at].item<std::int64_t>(); };
        if (layout != "TND") return {0, lengths ? length(number) : tokens.size(1)};
        const auto begin = number == 0 ? 0 : length(number - 1);
        return {begin, length(number) - begin};
    }

    Tensor of(const Tensor& x, std::int64_t number) const {
        const auto [begin, count] = rows(number);
        if (!table) {
            const auto all = layout == "TND" ? x : x.select(0, number);
            TORCH_CHECK(count >= 0 && begin + count <= all.size(0), "a sequence has ", count, " tokens from ", begin,
                        " on, of ", all.size(0));
            return all.slice(0, begin, begin + count);
        }
        const auto blocks = (count + x.size(1) - 1) / x.size(1);
        TORCH_CHECK(blocks <= table->size(1), "blockTable has ", table->size(1), " blocks for ", count, " keys");
        return x.index({table->select(0, number).slice(0, 0, blocks).to(at::kLong)}).flatten(0, 1).slice(0, 0, count);
    }

    std::int64_t count() const { return layout == "TND" ? lengths->size(0) : tokens.size(0); }
};

void require_sequences(const Sequences& queries, const Sequences& keys) {
    TORCH_CHECK(queries.layout == "BSND" || queries.layout == "TND", "layoutQuery is ", queries.layout,
                "; CANN takes BSND or TND");
    TORCH_CHECK(keys.layout == queries.layout || keys.layout == "PA_BSND", "layoutKey is ", keys.layout,
                "; CANN takes PA_BSND or that of the queries, ", queries.layout);
    TORCH_CHECK(queries.layout != "TND" || queries.lengths, "actualSeqLengthsQuery must be given in the layout TND");
    TORCH_CHECK(keys.layout == "BSND" || keys.lengths, "actualSeqLengthsKey must be given in the layout ", keys.layout);
    TORCH_CHECK(keys.table.has_value() == (keys.layout == "PA_BSND"),
                "blockTable must be given in the layout PA_BSND, and only there");
    const std::string query = queries.layout == "TND" ? "T N<=64 128" : "B S N<=64 128";
    const auto batches = std::to_string(queries.count());
    std::vector<Shaped> all{{"query", queries.tokens.sizes(), query}};
    if (keys.table) {
        all.push_back({"key", keys.tokens.sizes(), "* L%16<=1024 1 128"});
        all.push_back({"blockTable", keys.table->sizes(), batches + " *"});
    } else {
        all.push_back({"key", keys.tokens.sizes(), keys.layout == "TND" ? "* 1 128" : "B * 1 128"});
    }
    if (queries.lengths) all.push_back({"actualSeqLengthsQuery", queries.lengths->sizes(), batches});
    if (keys.lengths) all.push_back({"actualSeqLengthsKey", keys.lengths->sizes(), batches});
    require_shapes(all);
}

// What a head adds to the scores before it is weighted.
Tensor of_head(const Tensor& query, const Tensor& keys, std::int64_t head) {
    return at::relu(at::matmul(query.select(1, head), keys.t()));
}

// The scores of each query and key; the last query comes with the last key, and a key behind its own has none.
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

// Places without a key have the number -1 and the score 0.
void index_keys(const Tensor& query, const Tensor& key, const Tensor& weights, const OptionalIntegerTensor& queries,
                const OptionalIntegerTensor& keys, const OptionalIntegerTensor& table, const std::string& layout,
                const std::string& layout_of_keys, std::int64_t most, std::int64_t mode, std::int64_t before,
                std::int64_t after, bool with_scores, const Out& indices, const OptionalOut& values) {
    const Sequences of_queries{query, layout, queries}, of_keys{key, layout_of_keys, keys, table};
    require_sequences(of_queries, of_keys);
    TORCH_CHECK(mode == 0 || mode == 3, "sparseMode is ", mode, "; CANN takes 0 or 3");
    TORCH_CHECK(before == kNoBand && after == kNoBand, "preTokens is ", before, " and nextTokens ", after,
                "; CANN takes ", kNoBand);
    require_shapes({{"query", query.sizes(), "...n *"}, {"weights", weights.sizes(), "...n"}});
    TORCH_CHECK((most >= 1 && most <= 2048) || (most <= 8192 && most % 1024 == 0 && most > 0), "sparseCount is ", most,
                "; CANN takes 1 to 2048, and the multiples of 1024 up to 8192");
    auto shape = query.sizes().vec();
    shape[shape.size() - 2] = 1;
    shape.back() = most;
    auto numbers = at::full(shape, -1, indices.in_place().options());
    auto largest = at::zeros_like(numbers, numbers.options().dtype(at::kFloat));
    for (std::int64_t batch = 0; !query.is_meta() && batch < of_queries.count(); ++batch) {
        const auto found =
            scores_of(of_queries.of(query, batch), of_keys.of(key, batch), of_queries.of(weights, batch), mode == 3);
        const auto [sorted, order] = found.sort(/*stable=*/true, -1, /*descending=*/true);
        const auto top = sorted.slice(1, 0, most);
        const auto none = top.isneginf();
        const auto place = [&](const Tensor& x) {
            return of_queries.of(x, batch).select(1, 0).slice(1, 0, top.size(1));
        };
        place(numbers).copy_(order.slice(1, 0, most).masked_fill(none, -1));
        place(largest).copy_(top.masked_fill(none, 0));
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

// The gradients of one sequence, which are added to.
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
    require_sequences(of_queries, of_keys);
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
