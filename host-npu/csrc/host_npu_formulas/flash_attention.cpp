// FlashAttentionScore, its versions and its gradient.
#include <utility>

#include "host_npu_formulas/attention.h"
#include "host_npu_formulas/dropout.h"

namespace host_npu {
namespace {

// The rules of all versions; those of a sink, if any, follow the masks.
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

// Adds the separate rotated part of the heads after queries and keys.
TensorRules with_rope(TensorRules rules) {
    rules.insert(rules.begin() + 2, {"keyRope", as("query"), "* * *"});
    rules.insert(rules.begin() + 1, {"queryRope", as("query"), "* * *"});
    return rules;
}

// The last gradients are those of query, key, value and pse.
TensorRules with_grads_of_rope(TensorRules rules) {
    rules.insert(rules.end() - 2, {"dkRopeOut", kFloats});
    rules.insert(rules.end() - 4, {"dqRopeOut", kFloats});
    return rules;
}
TensorRules with_rope_grads(TensorRules rules) { return with_rope(with_grads_of_rope(std::move(rules))); }
TensorRules with_sink_grad(TensorRules rules) {
    rules.push_back({"dsinkOut", kFloat, "N"});
    return rules;
}

// The arguments of all versions. Unread ones control the precision of CANN, or are redundant.
struct Attention : Setting {
    Tensor query, key, value;
    OptionalTensor pse, padding_mask, reserved_sink;
    OptionalIntegerTensor mask;
    // The part of the heads that is passed as separate tensors.
    OptionalTensor query_rope, key_rope;
    Without<"queryRopeOptional"> no_query_rope;
    Without<"keyRopeOptional"> no_key_rope;
    Without<"dScaleQOptional"> query_scale;
    Without<"dScaleKOptional"> key_scale;
    Without<"dScaleVOptional"> value_scale;
    std::int64_t seed, offset;
    std::int64_t unread;
    Ints unread_ints;
    std::string unread_text;
};

struct Score : Attention {
    Out max, sum, result;
    OptionalOut softmax;
};

struct ScoreGrad : Attention {
    Tensor dy, max, sum;
    OptionalTensor softmax, result;
    Without<"dScaleDyOptional"> dy_scale;
    Without<"dScaleOOptional"> result_scale;
    Out dq, dk, dv;
    OptionalOut dquery_rope, dkey_rope;
    Without<"dqRopeOut"> no_dquery_rope;
    Without<"dkRopeOut"> no_dkey_rope;
    OptionalOut dpse, dsink, reserved_dsink;
};

void require_simulated(const Attention& call) {
    const auto& layout = call.softmax_layout;
    TORCH_CHECK(layout.empty() || layout == "same_as_input", "the layout of the softmax is ", layout,
                "; CANN takes none and same_as_input");
    TORCH_CHECK(!call.padding_mask, "the host NPU computes attention without a padding mask only");
    TORCH_CHECK(!call.reserved_sink || call.reserved_sink->numel() == 0,
                "the host NPU computes this version of attention without a sink only");
}

void score(const Score& call) {
    require_simulated(call);
    attend(call.query, call.key, call.value, call.pse, call.mask, call, call.max, call.sum, call.result);
}

void score_grad(const ScoreGrad& call) {
    require_simulated(call);
    attend_backward(call.query, call.key, call.value, call.dy, call.result, call.pse, call.mask, call.max, call.sum,
                    call, call.dq, call.dk, call.dv, call.dpse, call.dsink);
}

Attention with_whole_heads(Attention call) {
    TORCH_CHECK(call.query_rope && call.key_rope, "queryRope and keyRope must be given");
    require_shapes({{"query", call.query.sizes(), "T1 N1 D"},
                    {"queryRope", call.query_rope->sizes(), "T1 N1 R"},
                    {"key", call.key.sizes(), "T2 N2 D"},
                    {"keyRope", call.key_rope->sizes(), "T2 N2 R"}});
    call.query = at::cat({call.query, *call.query_rope}, -1);
    call.key = at::cat({call.key, *call.key_rope}, -1);
    return call;
}

void score_with_rope(const Score& given) {
    auto call = given;
    static_cast<Attention&>(call) = with_whole_heads(given);
    score(call);
}

void score_grad_with_rope(const ScoreGrad& given) {
    TORCH_CHECK(given.dquery_rope && given.dkey_rope, "dqRopeOut and dkRopeOut must be given");
    auto call = given;
    static_cast<Attention&>(call) = with_whole_heads(given);
    const auto dquery = at::empty_like(call.query), dkey = at::empty_like(call.key);
    call.dq = Out(dquery);
    call.dk = Out(dkey);
    score_grad(call);
    const auto size = given.query.size(-1);
    given.dq = dquery.slice(-1, 0, size);
    given.dk = dkey.slice(-1, 0, size);
    *given.dquery_rope = dquery.slice(-1, size);
    *given.dkey_rope = dkey.slice(-1, size);
}

// The number of attention weights of all heads, batches or sequences.
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

// If dropout has no mask, draws one from seed and offset.
void draw_missing_mask(Attention& call) {
    if (call.keep_prob == 1 || call.drop_mask) return;
    const auto count = count_of_weights(call.query, call.key, call);
    call.drop_mask.emplace(drawn_mask(count, 1 - call.keep_prob, call.seed, call.offset, call.query));
}

// Supports batches and sequences on the Ascend950, where CANN's documents reserve the sink. CANN reads neither the
// layout of the softmax nor, without quantization, the dtype of the result.
void score_v4(const Score& given) {
    auto call = given;
    draw_missing_mask(call);
    score(call);
}

void score_grad_v4(const ScoreGrad& given) {
    auto call = given;
    draw_missing_mask(call);
    score_grad(call);
}

constexpr Members<&Score::pse, &Score::drop_mask, &Score::padding_mask, &Score::mask> kScoreFurther;
constexpr auto kScoreInputs = Members<&Score::query, &Score::key, &Score::value>{} + kScoreFurther;
constexpr Members<&Score::max, &Score::sum, &Score::softmax, &Score::result> kScoreResults;
constexpr Members<&ScoreGrad::dy, &ScoreGrad::pse, &ScoreGrad::drop_mask, &ScoreGrad::padding_mask, &ScoreGrad::mask,
                  &ScoreGrad::max, &ScoreGrad::sum, &ScoreGrad::softmax, &ScoreGrad::result>
    kScoreGradFurther;
constexpr auto kScoreGradInputs = Members<&ScoreGrad::query, &ScoreGrad::key, &ScoreGrad::value>{} + kScoreGradFurther;
constexpr Members<&ScoreGrad::dq, &ScoreGrad::dk, &ScoreGrad::dv, &ScoreGrad::dpse> kScoreGrads;
constexpr Members<&Attention::prefix, &Attention::unread_ints, &Attention::unread_ints> kStarts;
constexpr Members<&Attention::unread_ints, &Attention::ends_of_queries, &Attention::ends_of_keys> kEnds;
constexpr Members<&Attention::prefix, &Attention::ends_of_queries, &Attention::ends_of_keys, &Attention::unread_ints,
                  &Attention::unread_ints>
    kStartsAndEnds;
constexpr Members<&Attention::scale, &Attention::keep_prob, &Attention::before, &Attention::after, &Attention::heads,
                  &Attention::layout>
    kScoreWindow;
constexpr Members<&Attention::unread, &Attention::mode> kScoreMode;
constexpr Members<&Attention::no_query_rope, &Attention::no_key_rope, &Attention::query_scale, &Attention::key_scale,
                  &Attention::value_scale>
    kQuantized;

const Formula<"aclnnFlashAttentionScore",
              collected<score, kScoreInputs, &Attention::prefix, kScoreWindow, kScoreMode, kScoreResults>>
    score_of_batches{forward_rules()};
const Formula<"aclnnFlashAttentionScoreV2",
              collected<score, kScoreInputs, kStarts, kScoreWindow, kScoreMode, &Attention::pse_type, kScoreResults>>
    score_with_pse_type{forward_rules()};
const Formula<"aclnnFlashAttentionScoreV3", collected<score, kScoreInputs, &Attention::sink, kStarts, kScoreWindow,
                                                      kScoreMode, &Attention::pse_type, kScoreResults>>
    score_with_sink{forward_rules({{"sinkInOptional", kFloat, "N"}})};
const Formula<"aclnnFlashAttentionScoreV4",
              collected<score_v4, kScoreInputs, kQuantized, &Attention::reserved_sink, kStartsAndEnds, kScoreWindow,
                        kScoreMode, &Attention::unread, &Attention::pse_type, &Attention::unread_text, &Attention::seed,
                        &Attention::offset, kScoreResults>>
    score_of_both{forward_rules({{"sinkOptional", kFloats}})};
const Formula<"aclnnFlashAttentionVarLenScore",
              collected<score, kScoreInputs, kEnds, kScoreWindow, kScoreMode, kScoreResults>>
    score_of_sequences{forward_rules()};
const Formula<"aclnnFlashAttentionVarLenScoreV2", collected<score, kScoreInputs, kStartsAndEnds, kScoreWindow,
                                                            kScoreMode, &Attention::pse_type, kScoreResults>>
    score_of_sequences_v2{forward_rules()};
const Formula<
    "aclnnFlashAttentionVarLenScoreV3",
    collected<score_with_rope, &Score::query, &Score::query_rope, &Score::key, &Score::key_rope, &Score::value,
              kScoreFurther, kStartsAndEnds, kScoreWindow, kScoreMode, &Attention::pse_type, kScoreResults>>
    score_of_sequences_with_rope{with_rope(forward_rules())};
const Formula<"aclnnFlashAttentionVarLenScoreV4", collected<score, kScoreInputs, kEnds, kScoreWindow, kScoreMode,
                                                            &Attention::softmax_layout, kScoreResults>>
    score_of_sequences_v4{forward_rules()};
const Formula<"aclnnFlashAttentionVarLenScoreV5",
              collected<score, &Score::query, &Score::no_query_rope, &Score::key, &Score::no_key_rope, &Score::value,
                        kScoreFurther, &Attention::sink, kStartsAndEnds, kScoreWindow, kScoreMode, &Attention::pse_type,
                        &Attention::softmax_layout, kScoreResults>>
    score_of_sequences_with_sink{forward_rules({{"sinkOptional", kFloat, "N"}})};

const Formula<"aclnnFlashAttentionScoreGrad",
              collected<score_grad, kScoreGradInputs, &Attention::prefix, kScoreWindow, kScoreMode, kScoreGrads>>
    grad_of_batches{backward_rules()};
const Formula<"aclnnFlashAttentionScoreGradV2", collected<score_grad, kScoreGradInputs, kStarts, kScoreWindow,
                                                          kScoreMode, &Attention::pse_type, kScoreGrads>>
    grad_with_pse_type{backward_rules()};
const Formula<"aclnnFlashAttentionScoreGradV3",
              collected<score_grad, kScoreGradInputs, &Attention::sink, kStarts, kScoreWindow, kScoreMode,
                        &Attention::pse_type, kScoreGrads, &ScoreGrad::dsink>>
    grad_with_sink{backward_rules({{"sinkInOptional", kFloat, "N"}}, {{"dsinkOut", kFloat, "N"}})};
const Formula<"aclnnFlashAttentionScoreGradV4",
              collected<score_grad_v4, kScoreGradInputs, &Attention::reserved_sink, kQuantized, &ScoreGrad::dy_scale,
                        &ScoreGrad::result_scale, kStartsAndEnds, kScoreWindow, &Attention::unread_text, kScoreMode,
                        &Attention::pse_type, &Attention::seed, &Attention::offset, &Attention::unread, &ScoreGrad::dq,
                        &ScoreGrad::dk, &ScoreGrad::dv, &ScoreGrad::no_dquery_rope, &ScoreGrad::no_dkey_rope,
                        &ScoreGrad::dpse, &ScoreGrad::reserved_dsink>>
    grad_of_both{backward_rules({{"sinkInOptional", kFloats}}, {{"dsinkOut", kFloats}})};
const Formula<"aclnnFlashAttentionUnpaddingScoreGrad",
              collected<score_grad, kScoreGradInputs, kEnds, kScoreWindow, kScoreMode, kScoreGrads>>
    grad_of_sequences{backward_rules()};
const Formula<"aclnnFlashAttentionUnpaddingScoreGradV2",
              collected<score_grad, kScoreGradInputs, kStartsAndEnds, kScoreWindow, kScoreMode, &Attention::pse_type,
                        kScoreGrads>>
    grad_of_sequences_v2{backward_rules()};
const Formula<"aclnnFlashAttentionUnpaddingScoreGradV3",
              collected<score_grad_with_rope, &ScoreGrad::query, &ScoreGrad::query_rope, &ScoreGrad::key,
                        &ScoreGrad::key_rope, &ScoreGrad::value, kScoreGradFurther, kStartsAndEnds, kScoreWindow,
                        kScoreMode, &Attention::pse_type, &ScoreGrad::dq, &ScoreGrad::dquery_rope, &ScoreGrad::dk,
                        &ScoreGrad::dkey_rope, &ScoreGrad::dv, &ScoreGrad::dpse>>
    grad_of_sequences_with_rope{with_rope_grads(backward_rules())};
const Formula<"aclnnFlashAttentionUnpaddingScoreGradV4", collected<score_grad, kScoreGradInputs, kEnds, kScoreWindow,
                                                                   kScoreMode, kScoreGrads, &Attention::softmax_layout>>
    grad_of_sequences_v4{backward_rules()};
const Formula<
    "aclnnFlashAttentionUnpaddingScoreGradV5",
    collected<score_grad, &ScoreGrad::query, &ScoreGrad::no_query_rope, &ScoreGrad::key, &ScoreGrad::no_key_rope,
              &ScoreGrad::value, kScoreGradFurther, &Attention::sink, kStartsAndEnds, kScoreWindow, kScoreMode,
              &Attention::pse_type, &Attention::softmax_layout, &ScoreGrad::dq, &ScoreGrad::dquery_rope, &ScoreGrad::dk,
              &ScoreGrad::dkey_rope, &ScoreGrad::dv, &ScoreGrad::dpse, &ScoreGrad::dsink>>
    grad_of_sequences_with_sink{with_sink_grad(with_grads_of_rope(backward_rules({{"sinkInOptional", kFloat, "N"}})))};

}  // namespace
}  // namespace host_npu
