// FlashAttentionScore, with its versions, and its gradient.
#include "host_npu_formulas/attention.h"
#include "host_npu_formulas/dropout.h"

namespace host_npu {
namespace {

// The rules of all versions, with those for a sink behind the masks if there is one.
TensorRules forward_rules(const TensorRules& sink = {}) {
    TensorRules rules{{"query", kFloats, "* * * | * * * *"},       {"key", as("query"), "* * * | * * * *"},
                      {"value", as("query"), "* * * | * * * *"},   {"realShiftOptional", as("query")},
                      {"dropMaskOptional", {ACL_UINT8}},           {"paddingMaskOptional", kFloats},
                      {"attenMaskOptional", {ACL_BOOL, ACL_UINT8}}};
    rules.insert(rules.end(), sink.begin(), sink.end());
    rules.insert(rules.end(), {{"softmaxMaxOut", kFloat},
                               {"softmaxSumOut", kFloat},
                               {"softmaxOutOut", kFloats},
                               {"attentionOutOut", kFloats}});
    return rules;
}

TensorRules backward_rules(const TensorRules& sink = {}, const TensorRules& dsink = {}) {
    TensorRules rules{{"query", kFloats, "* * * | * * * *"},
                      {"keyIn", as("query"), "* * * | * * * *"},
                      {"value", as("query"), "* * * | * * * *"},
                      {"dy", as("query"), "* * * | * * * *"},
                      {"pseShiftOptional", as("query")},
                      {"dropMaskOptional", {ACL_UINT8}},
                      {"paddingMaskOptional", kFloats},
                      {"attenMaskOptional", {ACL_BOOL, ACL_UINT8}},
                      {"softmaxMaxOptional", kFloat},
                      {"softmaxSumOptional", kFloat},
                      {"softmaxInOptional", kFloats},
                      {"attentionInOptional", kFloats}};
    rules.insert(rules.end(), sink.begin(), sink.end());
    rules.insert(rules.end(), {{"dqOut", kFloats}, {"dkOut", kFloats}, {"dvOut", kFloats}, {"dpseOut", kFloats}});
    rules.insert(rules.end(), dsink.begin(), dsink.end());
    return rules;
}

void require_no_padding_mask(const OptionalTensor& mask) {
    TORCH_CHECK(!mask, "the host NPU computes attention without a padding mask only");
}

void score(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
           const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
           const OptionalIntegerTensor& mask, const Ints& prefix, double scale, double keep_prob, std::int64_t before,
           std::int64_t after, std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode,
           const Out& max, const Out& sum, const OptionalOut&, const Out& out) {
    const Setting at{scale, before, after, heads, layout, mode, 1, {}, {}, keep_prob, drop_mask, prefix};
    require_no_padding_mask(padding_mask);
    attend(query, key, value, pse, mask, at, max, sum, out);
}
const Formula<"aclnnFlashAttentionScore", score> score_of_batches{forward_rules()};

void score_v2(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
              const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
              const OptionalIntegerTensor& mask, const Ints& prefix, const Ints&, const Ints&, double scale,
              double keep_prob, std::int64_t before, std::int64_t after, std::int64_t heads, const std::string& layout,
              std::int64_t, std::int64_t mode, std::int64_t pse_type, const Out& max, const Out& sum,
              const OptionalOut&, const Out& out) {
    const Setting at{scale, before, after, heads, layout, mode, pse_type, {}, {}, keep_prob, drop_mask, prefix};
    require_no_padding_mask(padding_mask);
    attend(query, key, value, pse, mask, at, max, sum, out);
}
const Formula<"aclnnFlashAttentionScoreV2", score_v2> score_with_pse_type{forward_rules()};

void score_packed(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
                  const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
                  const OptionalIntegerTensor& mask, const Ints&, const Ints& ends_of_queries, const Ints& ends_of_keys,
                  double scale, double keep_prob, std::int64_t before, std::int64_t after, std::int64_t heads,
                  const std::string& layout, std::int64_t, std::int64_t mode, const Out& max, const Out& sum,
                  const OptionalOut&, const Out& out) {
    const Setting at{scale, before, after, heads, layout, mode, 1, ends_of_queries, ends_of_keys, keep_prob, drop_mask};
    require_no_padding_mask(padding_mask);
    attend(query, key, value, pse, mask, at, max, sum, out);
}
const Formula<"aclnnFlashAttentionVarLenScore", score_packed> score_of_sequences{forward_rules()};

void score_grad(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
                const OptionalIntegerTensor& mask, const Tensor& max, const Tensor& sum, const OptionalTensor&,
                const OptionalTensor& result, const Ints& prefix, double scale, double keep_prob, std::int64_t before,
                std::int64_t after, std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode,
                const Out& dq, const Out& dk, const Out& dv, const OptionalOut& dpse) {
    const Setting at{scale, before, after, heads, layout, mode, 1, {}, {}, keep_prob, drop_mask, prefix};
    require_no_padding_mask(padding_mask);
    attend_backward(query, key, value, dy, result, pse, mask, max, sum, at, dq, dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionScoreGrad", score_grad> grad_of_batches{backward_rules()};

void score_grad_v2(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                   const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask,
                   const OptionalTensor& padding_mask, const OptionalIntegerTensor& mask, const Tensor& max,
                   const Tensor& sum, const OptionalTensor&, const OptionalTensor& result, const Ints& prefix,
                   const Ints&, const Ints&, double scale, double keep_prob, std::int64_t before, std::int64_t after,
                   std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode,
                   std::int64_t pse_type, const Out& dq, const Out& dk, const Out& dv, const OptionalOut& dpse) {
    const Setting at{scale, before, after, heads, layout, mode, pse_type, {}, {}, keep_prob, drop_mask, prefix};
    require_no_padding_mask(padding_mask);
    attend_backward(query, key, value, dy, result, pse, mask, max, sum, at, dq, dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionScoreGradV2", score_grad_v2> grad_with_pse_type{backward_rules()};

void score_grad_packed(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                       const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask,
                       const OptionalTensor& padding_mask, const OptionalIntegerTensor& mask, const Tensor& max,
                       const Tensor& sum, const OptionalTensor&, const OptionalTensor& result, const Ints&,
                       const Ints& ends_of_queries, const Ints& ends_of_keys, double scale, double keep_prob,
                       std::int64_t before, std::int64_t after, std::int64_t heads, const std::string& layout,
                       std::int64_t, std::int64_t mode, const Out& dq, const Out& dk, const Out& dv,
                       const OptionalOut& dpse) {
    const Setting at{scale, before, after, heads, layout, mode, 1, ends_of_queries, ends_of_keys, keep_prob, drop_mask};
    require_no_padding_mask(padding_mask);
    attend_backward(query, key, value, dy, result, pse, mask, max, sum, at, dq, dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionUnpaddingScoreGrad", score_grad_packed> grad_of_sequences{backward_rules()};

void score_v3(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
              const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
              const OptionalIntegerTensor& mask, const OptionalTensor& sink, const Ints& prefix, const Ints&,
              const Ints&, double scale, double keep_prob, std::int64_t before, std::int64_t after, std::int64_t heads,
              const std::string& layout, std::int64_t, std::int64_t mode, std::int64_t pse_type, const Out& max,
              const Out& sum, const OptionalOut&, const Out& out) {
    const Setting at{scale, before, after, heads, layout, mode, pse_type, {}, {}, keep_prob, drop_mask, prefix, sink};
    require_no_padding_mask(padding_mask);
    attend(query, key, value, pse, mask, at, max, sum, out);
}
const Formula<"aclnnFlashAttentionScoreV3", score_v3> score_with_sink{forward_rules({{"sinkInOptional", kFloat, "N"}})};

void score_grad_v3(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                   const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask,
                   const OptionalTensor& padding_mask, const OptionalIntegerTensor& mask, const Tensor& max,
                   const Tensor& sum, const OptionalTensor&, const OptionalTensor& result, const OptionalTensor& sink,
                   const Ints& prefix, const Ints&, const Ints&, double scale, double keep_prob, std::int64_t before,
                   std::int64_t after, std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode,
                   std::int64_t pse_type, const Out& dq, const Out& dk, const Out& dv, const OptionalOut& dpse,
                   const OptionalOut& dsink) {
    const Setting at{scale, before, after, heads, layout, mode, pse_type, {}, {}, keep_prob, drop_mask, prefix, sink};
    require_no_padding_mask(padding_mask);
    attend_backward(query, key, value, dy, result, pse, mask, max, sum, at, dq, dk, dv, dpse, dsink);
}
const Formula<"aclnnFlashAttentionScoreGradV3", score_grad_v3> grad_with_sink{
    backward_rules({{"sinkInOptional", kFloat, "N"}}, {{"dsinkOut", kFloat, "N"}})};

void require_layout_of_input(const std::string& layout) {
    TORCH_CHECK(layout == "same_as_input" || layout == "TND",
                "the host NPU has the statistics of a softmax in the layout of its input only, not ", layout);
}

void score_packed_v4(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
                     const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
                     const OptionalIntegerTensor& mask, const Ints& prefix, const Ints& ends_of_queries,
                     const Ints& ends_of_keys, double scale, double keep_prob, std::int64_t before, std::int64_t after,
                     std::int64_t heads, const std::string& layout, std::int64_t precise, std::int64_t mode,
                     const std::string& softmax_layout, const Out& max, const Out& sum, const OptionalOut& softmax,
                     const Out& out) {
    require_layout_of_input(softmax_layout);
    score_packed(query, key, value, pse, drop_mask, padding_mask, mask, prefix, ends_of_queries, ends_of_keys, scale,
                 keep_prob, before, after, heads, layout, precise, mode, max, sum, softmax, out);
}
const Formula<"aclnnFlashAttentionVarLenScoreV4", score_packed_v4> score_of_sequences_v4{forward_rules()};

void score_grad_packed_v4(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                          const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask,
                          const OptionalTensor& padding_mask, const OptionalIntegerTensor& mask, const Tensor& max,
                          const Tensor& sum, const OptionalTensor& softmax, const OptionalTensor& result,
                          const Ints& prefix, const Ints& ends_of_queries, const Ints& ends_of_keys, double scale,
                          double keep_prob, std::int64_t before, std::int64_t after, std::int64_t heads,
                          const std::string& layout, std::int64_t precise, std::int64_t mode, const Out& dq,
                          const Out& dk, const Out& dv, const OptionalOut& dpse, const std::string& softmax_layout) {
    require_layout_of_input(softmax_layout);
    score_grad_packed(query, key, value, dy, pse, drop_mask, padding_mask, mask, max, sum, softmax, result, prefix,
                      ends_of_queries, ends_of_keys, scale, keep_prob, before, after, heads, layout, precise, mode, dq,
                      dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionUnpaddingScoreGradV4", score_grad_packed_v4> grad_of_sequences_v4{backward_rules()};

// The number of weights of all heads, of batches or of sequences.
std::int64_t count_of_weights(const Tensor& query, const Tensor& key, const Setting& at) {
    if (!at.packed()) {
        const auto queries = by_head(query, at.layout, at.heads).sizes();
        const auto keys = at.layout == "BNSD" ? key.size(2) : key.size(at.layout == "SBH" ? 0 : 1);
        return queries[0] * at.heads * queries[2] * keys;
    }
    const auto ends_of_queries = present(at.ends_of_queries), ends_of_keys = present(at.ends_of_keys);
    TORCH_CHECK(ends_of_queries.size() == ends_of_keys.size(), "there are the ends of ", ends_of_queries.size(),
                " sequences of queries, but of ", ends_of_keys.size(), " of keys");
    std::int64_t count = 0, queries = 0, keys = 0;
    for (std::size_t index = 0; index < ends_of_queries.size(); ++index) {
        count += (ends_of_queries[index] - queries) * (ends_of_keys[index] - keys);
        queries = ends_of_queries[index];
        keys = ends_of_keys[index];
    }
    return count * at.heads;
}

// Without a mask, dropout draws one of seed and offset.
void draw_missing_mask(const Tensor& query, const Tensor& key, std::int64_t seed, std::int64_t offset, Setting& at) {
    if (at.keep_prob == 1 || at.drop_mask) return;
    at.drop_mask.emplace(drawn_mask(count_of_weights(query, key, at), 1 - at.keep_prob, seed, offset, query));
}

// CANN's documents reserve it.
void require_no_sink(const OptionalTensor& sink) {
    TORCH_CHECK(!sink || sink->numel() == 0, "the host NPU computes this version of attention without a sink only");
}

// Batches or sequences, on the Ascend950. CANN reads neither the layout of the softmax nor, without quantization, the
// dtype of the result.
void score_v4(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
              const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
              const OptionalIntegerTensor& mask, const Without<"queryRopeOptional">&, const Without<"keyRopeOptional">&,
              const Without<"dScaleQOptional">&, const Without<"dScaleKOptional">&, const Without<"dScaleVOptional">&,
              const OptionalTensor& sink, const Ints& prefix, const Ints& ends_of_queries, const Ints& ends_of_keys,
              const Ints&, const Ints&, double scale, double keep_prob, std::int64_t before, std::int64_t after,
              std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode, std::int64_t,
              std::int64_t pse_type, const std::string&, std::int64_t seed, std::int64_t offset, const Out& max,
              const Out& sum, const OptionalOut&, const Out& out) {
    Setting at{scale,    before,          after,        heads,     layout,    mode,
               pse_type, ends_of_queries, ends_of_keys, keep_prob, drop_mask, prefix};
    require_no_padding_mask(padding_mask);
    require_no_sink(sink);
    draw_missing_mask(query, key, seed, offset, at);
    attend(query, key, value, pse, mask, at, max, sum, out);
}
const Formula<"aclnnFlashAttentionScoreV4", score_v4> score_of_both{forward_rules({{"sinkOptional", kFloats}})};

void score_grad_v4(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                   const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask,
                   const OptionalTensor& padding_mask, const OptionalIntegerTensor& mask, const Tensor& max,
                   const Tensor& sum, const OptionalTensor&, const OptionalTensor& result, const OptionalTensor& sink,
                   const Without<"queryRopeOptional">&, const Without<"keyRopeOptional">&,
                   const Without<"dScaleQOptional">&, const Without<"dScaleKOptional">&,
                   const Without<"dScaleVOptional">&, const Without<"dScaleDyOptional">&,
                   const Without<"dScaleOOptional">&, const Ints& prefix, const Ints& ends_of_queries,
                   const Ints& ends_of_keys, const Ints&, const Ints&, double scale, double keep_prob,
                   std::int64_t before, std::int64_t after, std::int64_t heads, const std::string& layout,
                   const std::string&, std::int64_t, std::int64_t mode, std::int64_t pse_type, std::int64_t seed,
                   std::int64_t offset, std::int64_t, const Out& dq, const Out& dk, const Out& dv,
                   const Without<"dqRopeOut">&, const Without<"dkRopeOut">&, const OptionalOut& dpse,
                   const OptionalOut&) {
    Setting at{scale,    before,          after,        heads,     layout,    mode,
               pse_type, ends_of_queries, ends_of_keys, keep_prob, drop_mask, prefix};
    require_no_padding_mask(padding_mask);
    require_no_sink(sink);
    draw_missing_mask(query, key, seed, offset, at);
    attend_backward(query, key, value, dy, result, pse, mask, max, sum, at, dq, dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionScoreGradV4", score_grad_v4> grad_of_both{
    backward_rules({{"sinkInOptional", kFloats}}, {{"dsinkOut", kFloats}})};

}  // namespace
}  // namespace host_npu
