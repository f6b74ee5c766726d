// Attention for inference: PromptFlashAttention, IncreFlashAttention and FusedInferAttentionScore, without
// quantization.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/log.h>

#include <limits>

#include "host_npu_formulas/attention.h"

namespace host_npu {
namespace {

using Quantized = Without<"quantization">;
using Padded = Without<"padding sizes">;
using Shared = Without<"a shared prefix">;

// What all have in common, for what comes between the mask and the result.
TensorRules inference_rules(const TensorRules& between = {}, const TensorRules& after = {}) {
    TensorRules rules{{"query", kHalves, "* * * | * * * *"},
                      {"key", as("query"), "* * * | * * * *"},
                      {"value", as("query"), "* * * | * * * *"},
                      {"pseShiftOptional", kHalves},
                      {"attenMaskOptional", {ACL_BOOL, ACL_INT8, ACL_UINT8}}};
    rules.insert(rules.end(), between.begin(), between.end());
    rules.push_back({"attentionOut", kHalves});
    rules.insert(rules.end(), after.begin(), after.end());
    return rules;
}
const TensorRules kTable{{"blockTableOptional", {ACL_INT32}, "* *"}};
const TensorRules kTableAndRope{{"blockTableOptional", {ACL_INT32}, "* *"},
                                {"queryRopeOptional", as("query"), "* * 64 | * * * 64 | * * *"},
                                {"keyRopeOptional", as("key"), "* * 64 | * * * 64 | * * *"}};

// A call: absent tensors are undefined.
struct Inference {
    Tensor query, key, value;
    OptionalTensor query_rope, key_rope, pse;
    OptionalIntegerTensor mask, table;
    Ints queries, keys;
    std::int64_t heads_of_keys;

    std::int64_t batches(const Setting& at) const {
        if (at.packed()) return static_cast<std::int64_t>(queries.size());
        return at.layout == "NSD" ? 1 : query.size(0);
    }
};

void require_inference(const Inference& call, const Setting& at) {
    const auto& layout = at.layout;
    TORCH_CHECK(layout == "BSH" || layout == "BSND" || layout == "BNSD" || layout == "NSD" || layout == "BNSD_BSND" ||
                    layout == "TND",
                "the host NPU has the layouts BSH, BSND, BNSD, BNSD_BSND, NSD and TND only, not ", layout);
    TORCH_CHECK(at.mode >= 0 && at.mode <= 4, "the host NPU has the sparse modes 0 to 4 only, not ", at.mode);
    TORCH_CHECK(call.query_rope.has_value() == call.key_rope.has_value(),
                "queryRope and keyRope must be given together");
    TORCH_CHECK(!at.packed() || (!call.queries.empty() && !call.keys.empty() && !call.pse),
                "the layout TND needs the lengths of queries and keys, and supports no pse");
    TORCH_CHECK(!call.table || !call.keys.empty(), "a block table needs the lengths of the keys");
}

// The number of a batch's tokens: one for all batches, one for each, or all that there are.
std::int64_t length(const Ints& lengths, std::int64_t batch, std::int64_t all) {
    if (lengths.empty()) return all;
    const auto index = lengths.size() == 1 ? 0 : static_cast<std::size_t>(batch);
    TORCH_CHECK(index < lengths.size() && lengths[index] >= 0 && lengths[index] <= all, "batch ", batch, " of ",
                lengths.size(), " lengths must have 0 to ", all, " tokens");
    return lengths[index];
}

// The tokens of a sequence of a packed batch, as [1, heads, sequence, size].
Tensor sequence(const Tensor& x, const Ints& ends, std::int64_t number) {
    TORCH_CHECK(number < static_cast<std::int64_t>(ends.size()) && x.dim() == 3, "there are ", ends.size(),
                " sequences in shape ", x.sizes());
    const auto end = ends[static_cast<std::size_t>(number)];
    const auto begin = number == 0 ? 0 : ends[static_cast<std::size_t>(number) - 1];
    TORCH_CHECK(begin >= 0 && begin <= end && end <= x.size(0), "a sequence ends at ", end, " of ", x.size(0));
    return by_head(x.slice(0, begin, end), "TND", x.size(1));
}

// One batch as [1, heads, sequence, size], without what is past its length.
Tensor of_batch(const Tensor& x, const Ints& lengths, std::int64_t batch, std::int64_t heads, const Setting& at) {
    if (at.packed()) return sequence(x, lengths, batch);
    const auto as_batch = at.layout == "NSD" ? x.unsqueeze(0) : x;
    const auto layout = at.layout == "BSH" || at.layout == "BSND" ? at.layout : "BNSD";
    TORCH_CHECK(as_batch.dim() == (layout == "BSH" ? 3 : 4), "shape ", x.sizes(), " is not of the layout ", at.layout);
    const auto found = by_head(as_batch.narrow(0, batch, 1), layout, heads);
    TORCH_CHECK(found.size(1) == heads, "shape ", x.sizes(), " must have ", heads, " heads in the layout ", at.layout);
    return found.slice(2, 0, length(lengths, batch, found.size(2)));
}

// Keys in blocks, [blocks, tokens, heads * size] or [blocks, heads, tokens, size], as `table` puts them together.
Tensor of_blocks(const Tensor& x, const Inference& call, std::int64_t batch) {
    TORCH_CHECK(x.dim() == 3 || x.dim() == 4, "the host NPU takes blocks of 3 or 4 dimensions only, not ", x.sizes());
    const auto blocks = x.dim() == 3 ? by_head(x, "BSH", call.heads_of_keys) : x;
    TORCH_CHECK(blocks.size(1) == call.heads_of_keys, "blocks of shape ", x.sizes(), " must have ", call.heads_of_keys,
                " heads");
    const auto tokens = blocks.size(2);
    const auto wanted = length(call.keys, batch, call.table->size(1) * tokens);
    const auto numbers = call.table->select(0, batch).slice(0, 0, (wanted + tokens - 1) / tokens);
    return blocks.index({numbers.to(at::kLong)}).transpose(0, 1).flatten(1, 2).slice(1, 0, wanted).unsqueeze(0);
}

Tensor keys_of_batch(const Tensor& x, const Inference& call, std::int64_t batch, const Setting& at) {
    const auto keys = call.table ? of_blocks(x, call, batch) : of_batch(x, call.keys, batch, call.heads_of_keys, at);
    return repeated(keys, at.heads);
}

// The part of a tensor of scores or of a mask that is a batch's.
Tensor batch_of(const Tensor& x, std::int64_t batch, std::int64_t queries, std::int64_t keys) {
    const auto own = x.size(0) == 1 ? x : x.narrow(0, batch, 1);
    return own.slice(2, 0, queries).slice(3, 0, keys);
}

// [batches or 1, 1, queries, keys]. A single query's mask has no dimension for it, or one; a triangle stays.
OptionalIntegerTensor mask_of_batch(const Inference& call, std::int64_t batch, const Inputs& in, const Setting& at) {
    if (!call.mask || at.mode >= 2) return call.mask;
    const auto& mask = *call.mask;
    TORCH_CHECK(!at.packed(), "the host NPU takes a mask of the sparse modes 2 to 4 in the layout TND only");
    const auto one_query = call.query.size(at.layout == "BSH" || at.layout == "BSND" ? 1 : -2) == 1;
    Tensor whole = mask;
    if (one_query) {
        whole = mask.reshape({-1, 1, 1, mask.size(-1)});
    } else if (mask.dim() < 4) {
        whole = mask.dim() == 2 ? mask.unsqueeze(0).unsqueeze(0) : mask.unsqueeze(1);
    }
    TORCH_CHECK((whole.size(0) == 1 || whole.size(0) == call.batches(at)) && whole.size(1) == 1, "the mask has shape ",
                mask.sizes());
    return IntegerTensor(batch_of(whole, batch, in.query.size(2), in.key.size(2)));
}

Inputs inputs_of_batch(const Inference& call, std::int64_t batch, const Setting& at) {
    auto query = of_batch(call.query, call.queries, batch, at.heads, at);
    auto key = keys_of_batch(call.key, call, batch, at);
    if (call.query_rope) {
        query = at::cat({query, of_batch(*call.query_rope, call.queries, batch, at.heads, at)}, -1);
        key = at::cat({key, keys_of_batch(*call.key_rope, call, batch, at)}, -1);
    }
    return {query, key, keys_of_batch(call.value, call, batch, at), call.heads_of_keys, std::nullopt};
}

// A batch's rows and 0 for those past its length.
Tensor padded(const Tensor& x, std::int64_t rows) { return at::constant_pad_nd(x, {0, 0, 0, rows - x.size(2)}); }

Tensor together(const std::vector<Tensor>& batches, std::int64_t rows, const Setting& at) {
    std::vector<Tensor> parts;
    for (const auto& each : batches) parts.push_back(at.packed() ? in_layout(each, "TND") : padded(each, rows));
    return at::cat(parts);
}

Tensor log_of_sum(const Forward& each) {
    TORCH_CHECK(each.sum.is_meta() || each.sum.gt(0).all().item<bool>(),
                "the host NPU has no softmax_lse of a query that attends to nothing");
    return each.max + at::log(each.sum);
}

// CANN ignores the sparse mode and the band of one query; a mask counts.
Setting without_band(const Inference& call, Setting at) {
    const auto queries = call.query.size(at.layout == "BSH" || at.layout == "BSND" ? 1 : -2);
    if (at.packed() || queries != 1 || call.query_rope) return at;
    TORCH_CHECK(at.mode != 2 && at.mode != 4, "the host NPU has no sparse mode ", at.mode,
                " of a single query, which CANN ignores: use 0");
    at.before = at.after = std::numeric_limits<std::int32_t>::max();
    return at;
}

void infer(Inference call, const Setting& given, bool with_lse, const Out& out, const OptionalOut& lse) {
    const auto at = without_band(call, given);
    if (call.heads_of_keys == 0) call.heads_of_keys = at.heads;
    require_inference(call, at);
    std::vector<Tensor> results, logs;
    for (std::int64_t batch = 0; batch < call.batches(at); ++batch) {
        const auto in = inputs_of_batch(call, batch, at);
        const auto pse =
            call.pse ? OptionalTensor(batch_of(*call.pse, batch, in.query.size(2), in.key.size(2))) : std::nullopt;
        const auto each = attention(in, pse, mask_of_batch(call, batch, in, at), at);
        results.push_back(each.result);
        if (with_lse) logs.push_back(log_of_sum(each));
    }
    const auto rows = call.query.size(at.layout == "BSH" || at.layout == "BSND" ? 1 : -2);
    const auto result = together(results, rows, at);
    if (at.layout == "NSD") {
        out = result.squeeze(0);
    } else {
        out = at.packed() ? result : in_layout(result, at.layout == "BNSD_BSND" ? "BSND" : at.layout);
    }
    if (with_lse && lse) *lse = together(logs, rows, at);
}

// The key and the value of a list that has no more.
const Tensor& only(const std::vector<Tensor>& list) {
    TORCH_CHECK(list.size() == 1, "the host NPU takes one tensor of keys and one of values only, not ", list.size());
    return list.front();
}

void prompt(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
            const OptionalIntegerTensor& mask, const Ints& queries, const Ints& keys, const Quantized&,
            const Quantized&, const Quantized&, const Quantized&, const Quantized&, std::int64_t heads, double scale,
            std::int64_t before, std::int64_t after, const std::string& layout, std::int64_t heads_of_keys,
            std::int64_t mode, std::int64_t, const Out& out) {
    const Setting at{scale, before, after, heads, layout, mode, 0};
    infer({query, key, value, {}, {}, pse, mask, {}, queries, keys, heads_of_keys}, at, false, out, {});
}
const Formula<"aclnnPromptFlashAttentionV3", prompt> attention_of_prompts{inference_rules()};

void increment(const Tensor& query, const std::vector<Tensor>& key, const std::vector<Tensor>& value,
               const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Ints& keys, const Quantized&,
               const Quantized&, const Quantized&, const Quantized&, const Quantized&, const Quantized&,
               const Quantized&, const OptionalIntegerTensor& table, const Padded&, std::int64_t heads, double scale,
               const std::string& layout, std::int64_t heads_of_keys, std::int64_t, std::int64_t, const Out& out) {
    constexpr std::int64_t all = 2147483647;
    const Setting at{scale, all, all, heads, layout, 0, 0};
    TORCH_CHECK(query.size(layout == "BNSD" ? 2 : 1) == 1, "the query of shape ", query.sizes(), " is not one token");
    infer({query, only(key), only(value), {}, {}, pse, mask, table, {}, keys, heads_of_keys}, at, false, out, {});
}
const Formula<"aclnnIncreFlashAttentionV4", increment> attention_of_increments{inference_rules(kTable)};

void fused(const Tensor& query, const std::vector<Tensor>& key, const std::vector<Tensor>& value,
           const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Ints& queries, const Ints& keys,
           const Quantized&, const Quantized&, const Quantized&, const Quantized&, const Quantized&, const Quantized&,
           const Quantized&, const OptionalIntegerTensor& table, const Padded&, const Padded&, const Quantized&,
           const Quantized&, const Quantized&, const Quantized&, const Shared&, const Shared&, const Ints&,
           const OptionalTensor& query_rope, const OptionalTensor& key_rope, const Quantized&, std::int64_t heads,
           double scale, std::int64_t before, std::int64_t after, const std::string& layout, std::int64_t heads_of_keys,
           std::int64_t mode, std::int64_t, std::int64_t, std::int64_t, bool with_lse, std::int64_t, std::int64_t,
           const Out& out, const OptionalOut& lse) {
    const Setting at{scale, before, after, heads, layout, mode, 0};
    infer({query, only(key), only(value), query_rope, key_rope, pse, mask, table, queries, keys, heads_of_keys}, at,
          with_lse, out, lse);
}
const Formula<"aclnnFusedInferAttentionScoreV3", fused> attention_of_inference{
    inference_rules(kTableAndRope, {{"softmaxLse", kFloat}})};

void fused_v4(const Tensor& query, const std::vector<Tensor>& key, const std::vector<Tensor>& value,
              const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Ints& queries, const Ints& keys,
              const Quantized&, const Quantized&, const Quantized&, const Quantized&, const Quantized&,
              const Quantized&, const Quantized&, const OptionalIntegerTensor& table, const Padded&, const Padded&,
              const Quantized&, const Quantized&, const Quantized&, const Quantized&, const Shared&, const Shared&,
              const Ints&, const OptionalTensor& query_rope, const OptionalTensor& key_rope, const Quantized&,
              const Quantized&, const Without<"a learnable sink">&, std::int64_t heads, double scale,
              std::int64_t before, std::int64_t after, const std::string& layout, std::int64_t heads_of_keys,
              std::int64_t mode, std::int64_t, std::int64_t, std::int64_t, bool with_lse, std::int64_t, std::int64_t,
              std::int64_t, const Out& out, const OptionalOut& lse) {
    const Setting at{scale, before, after, heads, layout, mode, 0};
    infer({query, only(key), only(value), query_rope, key_rope, pse, mask, table, queries, keys, heads_of_keys}, at,
          with_lse, out, lse);
}
const Formula<"aclnnFusedInferAttentionScoreV4", fused_v4> attention_of_inference_v4{
    inference_rules(kTableAndRope, {{"softmaxLse", kFloat}})};

}  // namespace
}  // namespace host_npu
