// FlashAttentionScore, with its versions, and its gradient.
#include "host_npu_formulas/attention.h"

namespace host_npu {
namespace {

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
const Formula<"aclnnFlashAttentionScore", score> score_of_batches;

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
const Formula<"aclnnFlashAttentionScoreV2", score_v2> score_with_pse_type;

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
const Formula<"aclnnFlashAttentionVarLenScore", score_packed> score_of_sequences;

void score_grad(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
                const OptionalIntegerTensor& mask, const Tensor& max, const Tensor& sum, const OptionalTensor&,
                const OptionalTensor&, const Ints& prefix, double scale, double keep_prob, std::int64_t before,
                std::int64_t after, std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode,
                const Out& dq, const Out& dk, const Out& dv, const OptionalOut& dpse) {
    const Setting at{scale, before, after, heads, layout, mode, 1, {}, {}, keep_prob, drop_mask, prefix};
    require_no_padding_mask(padding_mask);
    attend_backward(query, key, value, dy, pse, mask, max, sum, at, dq, dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionScoreGrad", score_grad> grad_of_batches;

void score_grad_v2(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                   const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask,
                   const OptionalTensor& padding_mask, const OptionalIntegerTensor& mask, const Tensor& max,
                   const Tensor& sum, const OptionalTensor&, const OptionalTensor&, const Ints& prefix, const Ints&,
                   const Ints&, double scale, double keep_prob, std::int64_t before, std::int64_t after,
                   std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode,
                   std::int64_t pse_type, const Out& dq, const Out& dk, const Out& dv, const OptionalOut& dpse) {
    const Setting at{scale, before, after, heads, layout, mode, pse_type, {}, {}, keep_prob, drop_mask, prefix};
    require_no_padding_mask(padding_mask);
    attend_backward(query, key, value, dy, pse, mask, max, sum, at, dq, dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionScoreGradV2", score_grad_v2> grad_with_pse_type;

void score_grad_packed(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                       const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask,
                       const OptionalTensor& padding_mask, const OptionalIntegerTensor& mask, const Tensor& max,
                       const Tensor& sum, const OptionalTensor&, const OptionalTensor&, const Ints&,
                       const Ints& ends_of_queries, const Ints& ends_of_keys, double scale, double keep_prob,
                       std::int64_t before, std::int64_t after, std::int64_t heads, const std::string& layout,
                       std::int64_t, std::int64_t mode, const Out& dq, const Out& dk, const Out& dv,
                       const OptionalOut& dpse) {
    const Setting at{scale, before, after, heads, layout, mode, 1, ends_of_queries, ends_of_keys, keep_prob, drop_mask};
    require_no_padding_mask(padding_mask);
    attend_backward(query, key, value, dy, pse, mask, max, sum, at, dq, dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionUnpaddingScoreGrad", score_grad_packed> grad_of_sequences;

}  // namespace
}  // namespace host_npu
