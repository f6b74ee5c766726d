// Latent attention: RingMLA, which continues with further keys, and MLA, on a cache.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "atb/called.h"

namespace atb {
namespace {

// Latent attention to further keys. Inputs: queries and keys in two parts, [tokens, heads, size], values, mask, lengths
// of queries and keys, and the result and log-sum-exp of the attention to the previous keys.
struct Ring {
    static constexpr const char* kNames[] = {"q_nope", "q_rope", "k_nope",  "k_rope",  "value",
                                             "mask",   "seqlen", "pre_out", "prev_lse"};
    double scale;
    bool is_causal, is_first;

    void check(const Tensors& in) const {
        require_int32("seqlen", in[6]);
        TORCH_CHECK(in[6].dim() == 1 || (in[6].dim() == 2 && in[6].size(0) == 2), "seqlen has shape ", in[6].sizes(),
                    " instead of the lengths, or those of queries and of keys");
        const auto [queries, keys] = lengths(in);
        TORCH_CHECK(!is_causal || queries == keys, "the host NPU has mask_type_triu of as many queries as keys only");
        const auto sum = [](const std::vector<std::int64_t>& all) {
            TORCH_CHECK(std::all_of(all.begin(), all.end(), [](auto each) { return each >= 0; }), "seqlen has ",
                        at::IntArrayRef(all));
            return std::accumulate(all.begin(), all.end(), std::int64_t{0});
        };
        const auto tokens = sum(queries), further = sum(keys);
        TORCH_CHECK(in[0].dim() == 3 && in[0].size(0) == tokens && in[2].dim() == 3 && in[2].size(0) == further,
                    "seqlen is for ", tokens, " queries and ", further, " keys of shapes ", in[0].sizes(), " and ",
                    in[2].sizes());
        const auto heads = in[0].size(1), of_keys = in[2].size(1);
        TORCH_CHECK(of_keys > 0 && heads % of_keys == 0, heads, " heads of queries do not share ", of_keys,
                    " heads of keys");
        const auto require = [&](std::size_t input, std::int64_t first, std::int64_t second, std::int64_t last) {
            TORCH_CHECK(in[input].sizes() == at::IntArrayRef({first, second, last}), kNames[input], " has shape ",
                        in[input].sizes(), " instead of ", at::IntArrayRef({first, second, last}));
        };
        for (const std::size_t input : {1, 3, 4}) {
            TORCH_CHECK(in[input].dim() == 3, kNames[input], " has shape ", in[input].sizes(), " instead of [T, N, D]");
        }
        require(1, tokens, heads, in[3].size(2));
        require(2, further, of_keys, in[0].size(2));
        require(3, further, of_keys, in[1].size(2));
        require(4, further, of_keys, in[4].size(2));
        if (is_first) return;
        TORCH_CHECK(in.size() == 9, "calc_type_default needs pre_out and prev_lse");
        require(7, tokens, heads, in[4].size(2));
        TORCH_CHECK(in[8].sizes() == at::IntArrayRef({heads, tokens}), "prev_lse has shape ", in[8].sizes(),
                    " instead of ", at::IntArrayRef({heads, tokens}));
    }

    Tensors compute(const Tensors& in) const {
        const auto [queries, keys] = lengths(in);
        const auto query = at::cat({in[0], in[1]}, -1).to(at::kFloat).transpose(0, 1);
        const auto repeats = query.size(0) / in[2].size(1);
        const auto by_head = [&](const at::Tensor& x) {
            return x.to(at::kFloat).repeat_interleave(repeats, 1).transpose(0, 1);
        };
        const auto key = by_head(at::cat({in[2], in[3]}, -1)), value = by_head(in[4]);
        auto result = at::zeros({query.size(0), query.size(1), value.size(2)});
        auto log_sum = at::full({query.size(0), query.size(1)}, -std::numeric_limits<float>::infinity());
        for (std::size_t index = 0, row = 0, column = 0; index < queries.size(); ++index) {
            const std::int64_t first = row, begin = column;
            row += queries[index];
            column += keys[index];
            if (keys[index] == 0) continue;
            auto scores = query.slice(1, first, row).matmul(key.slice(1, begin, column).transpose(1, 2)) * scale;
            if (is_causal) {
                const auto after = at::full({queries[index], keys[index]}, -std::numeric_limits<float>::infinity());
                scores = scores + after.triu(1);
            }
            result.slice(1, first, row).copy_(scores.softmax(-1).matmul(value.slice(1, begin, column)));
            log_sum.slice(1, first, row).copy_(at::logsumexp(scores, -1));
        }
        if (is_first) return {result.transpose(0, 1), log_sum};
        const auto sum = at::logaddexp(in[8], log_sum);
        const auto share = [&](const at::Tensor& log) { return at::exp(log - sum).nan_to_num(0).unsqueeze(-1); };
        const auto before = in[7].to(at::kFloat).transpose(0, 1);
        return {(before * share(in[8]) + result * share(log_sum)).transpose(0, 1), sum};
    }

  private:
    static std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> lengths(const Tensors& in) {
        if (in[6].dim() == 1) return {numbers(in[6]), numbers(in[6])};
        return {numbers(in[6][0]), numbers(in[6][1])};
    }
};

// Latent attention of one query per sequence to two-part keys in blocks of a cache. The first parts are the values.
struct Latent {
    std::int64_t heads, key_heads, mask_type, calculation, cache;
    float scale;

    void check(const Tensors& in, const Tensors& out) const {
        TORCH_CHECK(in.size() == 6 && cache == 1 && mask_type == 0 && calculation != 1, "cache_mode is ", cache,
                    ", mask_type ", mask_type, " and calc_type ", calculation, ", and ", in.size() - 6,
                    " of qseqlen, qk_descale and pv_descale are given; the host NPU takes krope_ctkv (1), undefined ",
                    "(0), calc_type_undefined (0) or calc_type_ring (2), and none of the three");
        require_int32("block_tables", in[4]);
        const auto dtype = in[0].scalar_type();
        TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, "q_nope has dtype ", dtype,
                    " instead of Half or BFloat16");
        TORCH_CHECK(key_heads == 1, "kv_headnum is ", key_heads, " instead of 1");
        TORCH_CHECK(in[2].dim() == 4 && in[2].size(1) > 0 && in[2].size(1) <= 128 && in[4].dim() == 2,
                    "ctkv and block_tables have shapes ", in[2].sizes(), " and ", in[4].sizes(),
                    " instead of [blocks, at most 128, 1, 512] and [sequences, blocks]");
        const auto sequences = in[5].numel(), blocks = in[2].size(0), size = in[2].size(1);
        const auto require = [&](const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {
            TORCH_CHECK(tensor.sizes() == shape && tensor.scalar_type() == dtype, name, " has dtype ",
                        tensor.scalar_type(), " and shape ", tensor.sizes(), " instead of ", dtype, " and ", shape);
        };
        require("q_nope", in[0], {sequences, heads, 512});
        require("q_rope", in[1], {sequences, heads, 64});
        require("ctkv", in[2], {blocks, size, 1, 512});
        require("k_rope", in[3], {blocks, size, 1, 64});
        require("output", out[0], {sequences, heads, 512});
        TORCH_CHECK(calculation == 0 || out.size() == 2, "calc_type_ring (2) needs lse");
        if (calculation == 2) {
            TORCH_CHECK(out[1].sizes() == at::IntArrayRef({sequences, heads, 1}), "lse has shape ", out[1].sizes(),
                        " instead of ", at::IntArrayRef({sequences, heads, 1}));
        }
        for (const auto context : numbers(in[5])) {
            TORCH_CHECK(sequences <= in[4].size(0) && context >= 0 && context <= in[4].size(1) * size,
                        "block_tables of shape ", in[4].sizes(), " does not have the blocks of ", size, " of ", context,
                        " tokens");
        }
    }

    Tensors compute(const Tensors& in) const {
        const auto queries = at::cat({in[0], in[1]}, -1).to(at::kFloat);
        Tensors results, log_sums;
        const auto contexts = numbers(in[5]);
        for (std::size_t index = 0; index < contexts.size(); ++index) {
            const auto sequence = static_cast<std::int64_t>(index), context = contexts[index];
            const auto blocks = in[4][sequence].slice(0, 0, (context + in[2].size(1) - 1) / in[2].size(1));
            const auto part = [&](const at::Tensor& cache) { return at::index_select(cache, 0, blocks).flatten(0, 2); };
            const auto keys = at::cat({part(in[2]), part(in[3])}, -1).slice(0, 0, context).to(at::kFloat);
            const auto scores = queries[sequence].matmul(keys.t()) * scale;
            results.push_back(scores.softmax(-1).matmul(keys.slice(1, 0, 512)));
            log_sums.push_back(at::logsumexp(scores, -1, true));
        }
        if (results.empty()) return {};
        if (calculation == 0) return {at::cat(results)};
        return {at::cat(results), at::cat(log_sums)};
    }
};

}  // namespace
}  // namespace atb

extern "C" {
HOST_NPU_EXPORT int AtbRingMLAGetWorkspaceSize(const aclTensor* query, const aclTensor* query_rope,
                                               const aclTensor* key, const aclTensor* key_rope, const aclTensor* value,
                                               const aclTensor* mask, const aclTensor* lengths,
                                               const aclTensor* previous, const aclTensor* previous_log_sum,
                                               std::int64_t, std::int64_t, float scale, int, int mask_type, int,
                                               int calculation, aclTensor* result, aclTensor* log_sum,
                                               std::uint64_t* workspace_size, atb::Operation** operation,
                                               atb::Context*) {
    const atb::Ring ring{scale, mask_type == 1, calculation == 1};
    if (ring.is_first) previous = previous_log_sum = nullptr;
    return atb::begin({query, query_rope, key, key_rope, value, mask, lengths, previous, previous_log_sum}, {lengths},
                      {result, log_sum}, "RingMLA",
                      {[ring](const atb::Tensors& in, const atb::Tensors&) { ring.check(in); },
                       [ring](const atb::Tensors& in) { return ring.compute(in); }},
                      workspace_size, operation);
}

HOST_NPU_EXPORT int AtbRingMLA(void*, std::uint64_t, atb::Operation* operation, atb::Context* context) {
    return atb::run(operation, context);
}

HOST_NPU_EXPORT int AtbMLAGetWorkspaceSize(const aclTensor* query, const aclTensor* query_rope, const aclTensor* keys,
                                           const aclTensor* key_rope, const aclTensor* table, const aclTensor* contexts,
                                           const aclTensor*, const aclTensor* lengths, const aclTensor* score_scale,
                                           const aclTensor* value_scale, std::int32_t heads, float scale,
                                           std::int32_t key_heads, int mask_type, int calculation, std::uint8_t cache,
                                           aclTensor* result, aclTensor* log_sum, std::uint64_t* workspace_size,
                                           atb::Operation** operation, atb::Context*) {
    const atb::Latent latent{heads, key_heads, mask_type, calculation, cache, scale};
    // torch_npu reuses the operation for calls with other tensors.
    return atb::begin({query, query_rope, keys, key_rope, table, contexts, lengths, score_scale, value_scale},
                      {contexts, lengths}, {result, calculation == 2 ? log_sum : nullptr}, "MLA",
                      {[latent](const atb::Tensors& in, const atb::Tensors& out) { latent.check(in, out); },
                       [latent](const atb::Tensors& in) { return latent.compute(in); }},
                      workspace_size, operation);
}

HOST_NPU_EXPORT int AtbMLA(void*, std::uint64_t, atb::Operation* operation, atb::Context* context) {
    return atb::run(operation, context);
}
}
