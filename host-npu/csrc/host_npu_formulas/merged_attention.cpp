// Operators around attention: merging of partial results, and a softmax with a positional bias.
#include "host_npu_formulas/masked_softmax.h"

namespace host_npu {
namespace {

// Merges results over parts of the keys, weighted by their log-sum-exp.
void merge(const std::vector<Tensor>& logs, const std::vector<Tensor>& results, std::int64_t type, const Out& out,
           const OptionalOut&) {
    TORCH_CHECK(type == 0, "the host NPU has the update type 0 only, not ", type);
    TORCH_CHECK(!logs.empty() && logs.size() == results.size(), "there are ", logs.size(), " lse of ", results.size(),
                " results");
    for (std::size_t part = 0; part < logs.size(); ++part) {
        require_shapes({{"localOut[0]", results[0].sizes(), "...lse D"},
                        {"localOut", results[part].sizes(), "...lse D"},
                        {"lse", logs[part].sizes(), "...lse"}});
    }
    const auto weights = at::softmax(at::stack(logs), 0).unsqueeze(-1);
    out = (at::stack(results) * weights).sum(0);
}
const Formula<"aclnnAttentionUpdate", merge> merged_attention;

// Converts statistics [tokens, heads] from head order within each sequence to token order. `ends` start with 0.
Tensor by_token(const Tensor& x, const IntegerTensor& ends) {
    if (ends.is_meta()) return x;
    std::vector<Tensor> sequences;
    const auto bounds = ends.to(at::kLong).contiguous();
    for (std::int64_t index = 1; index < bounds.numel(); ++index) {
        const auto begin = bounds[index - 1].item<std::int64_t>(), end = bounds[index].item<std::int64_t>();
        TORCH_CHECK(0 <= begin && begin <= end && end <= x.size(0), "actualSeqQlen has ", begin, " and ", end, " for ",
                    x.size(0), " tokens");
        sequences.push_back(x.slice(0, begin, end).reshape({x.size(1), end - begin}).t());
    }
    TORCH_CHECK(
        bounds.numel() > 1 && bounds[0].item<std::int64_t>() == 0 && bounds[-1].item<std::int64_t>() == x.size(0),
        "actualSeqQlen does not begin with 0 and end with the number of tokens, ", x.size(0));
    return at::cat(sequences);
}

// Converts softmax statistics with 8 equal columns, [batch, heads, sequence, 8] for SBH or [tokens, heads, 8] for TND,
// to factors of the results.
Tensor of_results(const Tensor& columns, const Tensor& result, const std::string& layout,
                  const OptionalIntegerTensor& ends) {
    const auto one = columns.select(-1, 0);
    if (layout == "TND") return (ends ? by_token(one, *ends) : one).unsqueeze(-1);
    return one.permute({2, 0, 1}).repeat_interleave(result.size(-1) / one.size(1), -1);
}

// Merges attention over some keys with attention over further keys.
void ring_update(const Tensor& result1, const Tensor& max1, const Tensor& sum1, const Tensor& result2,
                 const Tensor& max2, const Tensor& sum2, const OptionalIntegerTensor& ends, const std::string& layout,
                 const std::string& softmax_layout, const Out& out, const Out& max_out, const Out& sum_out) {
    TORCH_CHECK(layout == "SBH" || layout == "TND", "inputLayout is ", layout, "; CANN takes SBH and TND");
    TORCH_CHECK(layout == "SBH" || ends, "the layout TND needs actualSeqQlen");
    const auto of_result = layout == "SBH" ? "S B H" : "T N D", of_statistics = layout == "SBH" ? "B N S 8" : "T N 8";
    require_shapes({{"prevAttnOut", result1.sizes(), of_result},
                    {"prevSoftmaxMax", max1.sizes(), of_statistics},
                    {"prevSoftmaxSum", sum1.sizes(), of_statistics},
                    {"curAttnOut", result2.sizes(), of_result},
                    {"curSoftmaxMax", max2.sizes(), of_statistics},
                    {"curSoftmaxSum", sum2.sizes(), of_statistics}});
    TORCH_CHECK(layout == "TND" || (max1.size(1) > 0 && result1.size(2) % max1.size(1) == 0), "prevAttnOut has shape ",
                result1.sizes(), ", whose last dimension is not made of ", max1.size(1), " heads");
    const auto max = at::maximum(max1, max2);
    const auto part1 = sum1 * at::exp(max1 - max), part2 = sum2 * at::exp(max2 - max);
    const auto sum = part1 + part2;
    max_out = max;
    sum_out = sum;
    const auto by_head = softmax_layout == "TND" ? std::nullopt : ends;
    out = result1 * of_results(part1 / sum, result1, layout, by_head) +
          result2 * of_results(part2 / sum, result2, layout, by_head);
}
const Formula<"aclnnRingAttentionUpdateV2", ring_update> attention_to_more_keys;

// x is [batch, windows, heads, rows, columns], with batch and windows possibly merged.
void masked_softmax(const Tensor& x, const OptionalTensor& mask, const Tensor& bias, double scale, std::int64_t,
                    const Out& out) {
    auto scores = x * scale + bias.reshape({bias.size(-3), bias.size(-2), bias.size(-1)});
    if (mask) {
        const auto of_windows = mask->reshape({-1, 1, mask->size(-2), mask->size(-1)});
        const auto windows = of_windows.size(0);
        TORCH_CHECK(windows > 0 && (x.dim() == 5 ? x.size(1) == windows : x.size(0) % windows == 0),
                    "attenMaskOptional has ", windows, " windows for x of shape ", x.sizes());
        scores = (x.dim() == 5 ? scores : scores.unflatten(0, {-1, windows})) + of_windows;
    }
    out = at::softmax(scores, -1).view(x.sizes());
}
const Formula<"aclnnMaskedSoftmaxWithRelPosBias", masked_softmax> softmax_with_bias{
    {"x", kFloats, "* N S T | B W N S T"},
    {"attenMaskOptional", kFloats, "* S T | * 1 S T | 1 W 1 S T"},
    {"relativePosBias", kFloats, "N S T | 1 N S T | 1 1 N S T"},
    {"out", kFloats},
};

// The mask; if `triangular`, everything above the diagonal instead.
Tensor masked_places(const Tensor& mask, const Tensor& x, bool triangular) {
    return triangular ? at::ones_like(x, at::kBool).triu(1) : mask.to(at::kBool);
}

}  // namespace

Tensor scaled_masked_softmax(const Tensor& x, const Tensor& mask, double scale, bool triangular) {
    constexpr double masked = -10000;
    return at::softmax((x * scale).masked_fill(masked_places(mask, x, triangular), masked), -1);
}

Tensor scaled_masked_softmax_grad(const Tensor& dy, const Tensor& y, const Tensor& mask, double scale,
                                  bool triangular) {
    return (y * (dy - (y * dy).sum(-1, true)) * scale).masked_fill(masked_places(mask, y, triangular), 0);
}

namespace {

void scaled_masked(const Tensor& x, const IntegerTensor& mask, double scale, bool triangular, const Out& out) {
    out = scaled_masked_softmax(x, mask, scale, triangular);
}
const Formula<"aclnnScaledMaskedSoftmax", scaled_masked> softmax_with_mask{
    {"x", kFloats, "N C H%32<=4096 W%32<=4096"},
    {"mask", {ACL_BOOL}},
    {"y", kFloats, "N C H W"},
};

void scaled_masked_grad(const Tensor& dy, const Tensor& y, const IntegerTensor& mask, double scale, bool triangular,
                        const Out& dx) {
    dx = scaled_masked_softmax_grad(dy, y, mask, scale, triangular);
}
const Formula<"aclnnScaledMaskedSoftmaxBackward", scaled_masked_grad> softmax_with_mask_backward{
    {"gradY", kFloats},
    {"y", kFloats},
    {"mask", {ACL_BOOL}},
    {"out", kFloats},
};

}  // namespace
}  // namespace host_npu
