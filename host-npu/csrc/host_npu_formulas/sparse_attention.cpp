// SparseFlashAttention and its gradient: each query attends to chosen keys. Heads are those of latent attention, whose
// values are the keys without the rotated part.
#include "host_npu_formulas/sequence_layouts.h"
#include "opapi/chip.h"

namespace host_npu {
namespace {

constexpr std::int64_t kLatent = 512;

struct SparseAttention {
    Tensor query, key, value;
    IntegerTensor indices;
    OptionalIntegerTensor table, query_lengths, key_lengths;
    OptionalTensor query_rope, key_rope;
    double scale;
    std::int64_t block_size;
    std::string layout, layout_of_keys;
    std::int64_t mode, before, after;

    Sequences queries() const { return {query, layout, query_lengths}; }
    Sequences keys() const { return {key, layout_of_keys, key_lengths, table}; }
};

bool is_power_of_2(std::int64_t x) { return x > 0 && (x & (x - 1)) == 0; }

void require_chosen(const SparseAttention& call) {
    TORCH_CHECK(call.query_rope && call.key_rope, "queryRope and keyRope must be given");
    require_sequences(call.queries(), call.keys(), "N<=128 512", "512");
    require_band(call.mode, call.before, call.after);
    const auto heads = call.query.size(-2), size = call.block_size;
    const bool is_950 = soc() == Soc::Ascend950;
    TORCH_CHECK(is_950 || is_power_of_2(heads), "query has ", heads, " heads; CANN takes powers of 2 on this chip");
    TORCH_CHECK(is_950 ? size == 1 : is_power_of_2(size) && size <= 128, "sparseBlockSize is ", size, "; CANN takes ",
                is_950 ? "1" : "powers of 2 up to 128", " on this chip");
    TORCH_CHECK(!call.table || call.key.size(1) % size == 0, "sparseBlockSize is ", size,
                ", which does not divide the ", call.key.size(1), " tokens of a block of key");
    require_shapes({{"query", call.query.sizes(), "...q N *"},
                    {"queryRope", call.query_rope->sizes(), "...q N 64"},
                    {"sparseIndices", call.indices.sizes(), "...q 1 *"}});
    require_shapes({{"key", call.key.sizes(), "...k *"},
                    {"value", call.value.sizes(), "...k 512"},
                    {"keyRope", call.key_rope->sizes(), "...k 64"}});
    TORCH_CHECK(call.indices.size(-1) > 0, "sparseIndices has shape ", call.indices.sizes(), " without an index");
    // CANN reads only one of them. Compared by bits, because they may contain NaN.
    TORCH_CHECK(call.value.is_meta() || call.value.view(at::kInt).equal(call.key.view(at::kInt)),
                "value differs from key, which CANN does not take");
}

// One sequence: heads with their rotated parts, and the indices of each query's blocks of keys.
struct ChosenKeys {
    Tensor query, key, numbers;
    std::int64_t block_size;
    bool causal;

    // The indices of the keys that a query attends to. Its blocks end at the first -1.
    Tensor chosen(std::int64_t row) const {
        const auto kept = numbers[row].lt(0).cumsum(0).eq(0);
        const auto blocks = numbers[row].index({kept});
        const auto keys = key.size(0), count = (keys + block_size - 1) / block_size;
        TORCH_CHECK(blocks.lt(count).all().item<bool>(), "sparseIndices has a block behind the ", count, " of ", keys,
                    " keys");
        const auto tokens = (blocks.unsqueeze(1) * block_size + at::arange(block_size)).flatten();
        const auto end = causal ? std::min(keys, keys - query.size(0) + row + 1) : keys;
        return tokens.index({tokens.lt(end)});
    }
};

ChosenKeys chosen_keys_of(const SparseAttention& call, std::int64_t number) {
    const auto queries = call.queries(), keys = call.keys();
    return {at::cat({queries.of(call.query, number), queries.of(*call.query_rope, number)}, -1),
            at::cat({keys.of(call.key, number), keys.of(*call.key_rope, number)}, -1).select(1, 0),
            queries.of(call.indices, number).select(1, 0).to(at::kLong), call.block_size, call.mode == 3};
}

// Moves the query dimensions of statistics [B, 1, S, N] or [1, T, N] first.
Tensor by_query(const Tensor& statistics) { return statistics.select(-3, 0); }

// A query without keys keeps the result 0 and the statistics 0.
void attend_to_chosen(const SparseAttention& call, const Tensor& out, const Tensor& max, const Tensor& sum) {
    const auto queries = call.queries();
    for (std::int64_t number = 0; number < queries.count(); ++number) {
        const auto in = chosen_keys_of(call, number);
        const auto to = queries.of(out, number), to_max = queries.of(max, number), to_sum = queries.of(sum, number);
        for (std::int64_t row = 0; row < in.query.size(0); ++row) {
            const auto keys = in.key.index({in.chosen(row)});
            if (keys.size(0) == 0) continue;
            const auto scores = at::matmul(in.query[row], keys.t()) * call.scale;
            const auto largest = scores.amax(-1, true);
            const auto weights = at::exp(scores - largest);
            const auto total = weights.sum(-1, true);
            to[row].copy_(at::matmul(weights / total, keys.slice(1, 0, kLatent)));
            to_max[row].copy_(largest.squeeze(-1));
            to_sum[row].copy_(total.squeeze(-1));
        }
    }
}

void sparse_attention(const Tensor& query, const Tensor& key, const Tensor& value, const IntegerTensor& indices,
                      const OptionalIntegerTensor& table, const OptionalIntegerTensor& query_lengths,
                      const OptionalIntegerTensor& key_lengths, const OptionalTensor& query_rope,
                      const OptionalTensor& key_rope, double scale, std::int64_t block_size, const std::string& layout,
                      const std::string& layout_of_keys, std::int64_t mode, std::int64_t before, std::int64_t after,
                      std::int64_t attention_mode, bool with_statistics, const Out& out, const OptionalOut& max,
                      const OptionalOut& sum) {
    const SparseAttention call{query,          key,        value,    indices, table,      query_lengths,
                               key_lengths,    query_rope, key_rope, scale,   block_size, layout,
                               layout_of_keys, mode,       before,   after};
    TORCH_CHECK(attention_mode == 2, "attentionMode is ", attention_mode, "; CANN takes 2");
    require_chosen(call);
    TORCH_CHECK(!with_statistics || !table, "returnSoftmaxLse is not for the layout PA_BSND");
    const auto result = at::zeros_like(query);
    auto shape = query.sizes().slice(0, query.dim() - 1).vec();
    const auto largest = at::zeros(shape, query.options()), total = at::zeros_like(largest);
    if (!query.is_meta()) attend_to_chosen(call, result, largest, total);
    out = result;
    if (!with_statistics) return;
    TORCH_CHECK(max && sum, "softmaxMax and softmaxSum must be given where returnSoftmaxLse is true");
    *max = largest.unsqueeze(-3);
    *sum = total.unsqueeze(-3);
}
const Formula<"aclnnSparseFlashAttention", sparse_attention> attention_to_chosen_keys{
    {"query", kHalves, "* * * | * * * *"},
    {"key", as("query"), "* * * | * * * *"},
    {"value", as("query")},
    {"sparseIndices", {ACL_INT32}, "* * * | * * * *"},
    {"blockTableOptional", {ACL_INT32}, "* *"},
    {"actualSeqLengthsQueryOptional", {ACL_INT32}, "*"},
    {"actualSeqLengthsKvOptional", {ACL_INT32}, "*"},
    {"queryRopeOptional", as("query")},
    {"keyRopeOptional", as("query")},
    {"attentionOut", as("query")},
    {"softmaxMax", kFloat},
    {"softmaxSum", kFloat},
};

void sparse_attention_grad(const Tensor& query, const Tensor& key, const Tensor& value, const IntegerTensor& indices,
                           const Tensor& dy, const Tensor& result, const Tensor& max, const Tensor& sum,
                           const OptionalIntegerTensor& query_lengths, const OptionalIntegerTensor& key_lengths,
                           const OptionalTensor& query_rope, const OptionalTensor& key_rope, double scale,
                           std::int64_t block_size, const std::string& layout, std::int64_t mode, std::int64_t before,
                           std::int64_t after, bool, const Out& dq, const Out& dk, const Out& dv,
                           const OptionalOut& dq_rope, const OptionalOut& dk_rope) {
    const SparseAttention call{query,    key,   value,      indices, {},     query_lengths, key_lengths, query_rope,
                               key_rope, scale, block_size, layout,  layout, mode,          before,      after};
    require_chosen(call);
    const auto count = indices.size(-1);
    TORCH_CHECK(count % 1024 == 0 && count <= 8192, "sparseIndices has ", count,
                " indices for a query; CANN takes the multiples of 1024 up to 8192");
    TORCH_CHECK(block_size == 1 || (block_size >= 8 && block_size <= 64), "sparseBlockSize is ", block_size,
                "; CANN takes 1, 8, 16, 32 and 64");
    TORCH_CHECK(dq_rope && dk_rope, "dQueryRope and dKeyRope must be given");
    const auto statistics = layout == "TND" ? "1 T N" : "B 1 S N", tokens = layout == "TND" ? "T N 512" : "B S N 512";
    require_shapes({{"query", query.sizes(), tokens},
                    {"dOut", dy.sizes(), tokens},
                    {"out", result.sizes(), tokens},
                    {"softmaxMax", max.sizes(), statistics},
                    {"softmaxSum", sum.sizes(), statistics}});
    const auto to_query = at::zeros_like(query), to_query_rope = at::zeros_like(*query_rope);
    const auto to_key = at::zeros_like(key), to_key_rope = at::zeros_like(*key_rope), to_value = at::zeros_like(key);
    const auto queries = call.queries(), keys = call.keys();
    for (std::int64_t number = 0; !query.is_meta() && number < queries.count(); ++number) {
        const auto in = chosen_keys_of(call, number);
        const auto own_dy = queries.of(dy, number), own = queries.of(result, number);
        const auto own_max = queries.of(by_query(max), number), own_sum = queries.of(by_query(sum), number);
        const auto dkeys = at::zeros_like(in.key), dvalues = keys.of(to_value, number).select(1, 0);
        for (std::int64_t row = 0; row < in.query.size(0); ++row) {
            const auto chosen = in.chosen(row), key_rows = in.key.index({chosen});
            if (chosen.size(0) == 0) continue;
            const auto scores = at::matmul(in.query[row], key_rows.t()) * scale;
            const auto weights = at::exp(scores - own_max[row].unsqueeze(-1)) / own_sum[row].unsqueeze(-1);
            const auto dweights = at::matmul(own_dy[row], key_rows.slice(1, 0, kLatent).t());
            const auto dscores = weights * (dweights - (own_dy[row] * own[row]).sum(-1, true)) * scale;
            const auto dquery = at::matmul(dscores, key_rows);
            queries.of(to_query, number)[row].copy_(dquery.slice(1, 0, kLatent));
            queries.of(to_query_rope, number)[row].copy_(dquery.slice(1, kLatent));
            dkeys.index_add_(0, chosen, at::matmul(dscores.t(), in.query[row]));
            dvalues.index_add_(0, chosen, at::matmul(weights.t(), own_dy[row]));
        }
        keys.of(to_key, number).select(1, 0).copy_(dkeys.slice(1, 0, kLatent));
        keys.of(to_key_rope, number).select(1, 0).copy_(dkeys.slice(1, kLatent));
    }
    dq = to_query;
    dk = to_key;
    dv = to_value;
    *dq_rope = to_query_rope;
    *dk_rope = to_key_rope;
}
const Formula<"aclnnSparseFlashAttentionGrad", sparse_attention_grad> attention_to_chosen_keys_backward{
    {"query", kHalves, "* * * | * * * *"},
    {"key", as("query"), "* * * | * * * *"},
    {"value", as("query")},
    {"sparseIndices", kIndices, "* * * | * * * *"},
    {"dOut", as("query")},
    {"out", as("query")},
    {"softmaxMax", kFloat},
    {"softmaxSum", kFloat},
    {"actualSeqLengthsQueryOptional", {ACL_INT32}, "*"},
    {"actualSeqLengthsKvOptional", {ACL_INT32}, "*"},
    {"queryRopeOptional", as("query")},
    {"keyRopeOptional", as("query")},
    {"dQuery", as("query")},
    {"dKey", as("query")},
    {"dValue", as("query")},
    {"dQueryRopeOptional", as("query")},
    {"dKeyRopeOptional", as("query")},
};

}  // namespace
}  // namespace host_npu
