// FlashAttentionScore and its gradient: attention with its scores in memory. Without dropout.
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

using Ints = std::vector<std::int64_t>;

// The number of equal columns that CANN gives each softmax statistic.
constexpr std::int64_t kColumns = 8;
// The rows and columns of the triangle that the modes 2 to 4 take as a mask.
constexpr std::int64_t kTriangle = 2048;

// What all versions have in common.
struct Setting {
    double scale;
    std::int64_t before;
    std::int64_t after;
    std::int64_t heads;
    std::string layout;
    std::int64_t mode;
    std::int64_t pse_type;
    Ints ends_of_queries = {};
    Ints ends_of_keys = {};

    bool packed() const { return layout == "TND"; }
};

void require_computed(const Setting& at, double keep_prob, const OptionalIntegerTensor& drop_mask,
                      const OptionalTensor& padding_mask) {
    TORCH_CHECK(keep_prob == 1 && !drop_mask, "the host NPU computes attention without dropout only");
    TORCH_CHECK(!padding_mask, "the host NPU computes attention without a padding mask only");
    TORCH_CHECK(at.mode >= 0 && at.mode <= 4, "the host NPU has the sparse modes 0 to 4 only, not ", at.mode);
    TORCH_CHECK(at.pse_type == 0 || at.pse_type == 1, "the host NPU has the pse types 0 and 1 only, not ", at.pse_type);
    TORCH_CHECK(at.layout == "BSH" || at.layout == "SBH" || at.layout == "BSND" || at.layout == "BNSD" || at.packed(),
                "the layout is ", at.layout, " instead of BSH, SBH, BSND, BNSD or TND");
}

// As [batch, heads, sequence, size].
Tensor by_head(const Tensor& x, const std::string& layout, std::int64_t heads) {
    if (layout == "BNSD") return x;
    if (layout == "BSND") return x.transpose(1, 2);
    if (layout == "TND") return x.transpose(0, 1).unsqueeze(0);
    const auto split = x.unflatten(-1, {heads, -1});
    return layout == "BSH" ? split.transpose(1, 2) : split.permute({1, 2, 0, 3});
}

Tensor in_layout(const Tensor& x, const std::string& layout) {
    if (layout == "BNSD") return x;
    if (layout == "BSND") return x.transpose(1, 2);
    if (layout == "TND") return x.squeeze(0).transpose(0, 1);
    return (layout == "BSH" ? x.transpose(1, 2) : x.permute({2, 0, 1, 3})).flatten(-2);
}

// The heads of keys and values are as many as the query's, or each is that of a group of them.
Tensor repeated(const Tensor& x, std::int64_t heads) {
    TORCH_CHECK(x.size(1) > 0 && heads % x.size(1) == 0, heads, " heads of queries cannot share ", x.size(1));
    return x.unsqueeze(2).expand({-1, -1, heads / x.size(1), -1, -1}).flatten(1, 2);
}

Tensor sum_of_groups(const Tensor& grad, std::int64_t heads) { return grad.unflatten(1, {heads, -1}).sum(2); }

// Queries, keys and values of one batch or one sequence, by head.
struct Inputs {
    Tensor query;
    Tensor key;
    Tensor value;
    std::int64_t heads_of_keys;
};

Inputs inputs(const Tensor& query, const Tensor& key, const Tensor& value, const Setting& at) {
    const auto q = by_head(query, at.layout, at.heads);
    TORCH_CHECK(q.dim() == 4 && q.size(1) == at.heads, "the query of shape ", query.sizes(), " has not ", at.heads,
                " heads in the layout ", at.layout);
    const bool joined = at.layout == "BSH" || at.layout == "SBH";
    const auto heads_of_keys = joined ? key.size(-1) / q.size(-1) : key.size(at.layout == "BSND" ? 2 : 1);
    const auto k = by_head(key, at.layout, heads_of_keys);
    const auto v = by_head(value, at.layout, heads_of_keys);
    return {q, repeated(k, at.heads), repeated(v, at.heads), heads_of_keys};
}

// A mask of the modes 2 to 4 is a triangle of 2048 rows, whatever the lengths: its first and its last row tell.
void require_triangle(const Tensor& mask) {
    TORCH_CHECK(mask.dim() >= 2 && mask.size(-1) == kTriangle && mask.size(-2) == kTriangle,
                "the mask of the sparse modes 2 to 4 has shape ", mask.sizes(), " instead of ends of 2048 x 2048");
    if (mask.is_meta()) return;
    const auto last = mask.reshape({-1, kTriangle, kTriangle})[0][-1].to(at::kBool);
    const auto first = mask.reshape({-1, kTriangle, kTriangle})[0][0].to(at::kBool);
    TORCH_CHECK(!first[0].item<bool>() && first.slice(0, 1).all().item<bool>() && !last.any().item<bool>(),
                "the mask of the sparse modes 2 to 4 is not the upper triangle without the diagonal");
}

// Where `distance` of key and query, from the first ones or the last ones, is outside of the band.
Tensor outside(const Inputs& in, std::int64_t before, std::int64_t after, bool from_the_last) {
    const auto options = in.query.options().dtype(at::kLong);
    const auto queries = in.query.size(2), keys = in.key.size(2);
    const auto shift = from_the_last ? keys - queries : 0;
    const auto distance = at::arange(keys, options).unsqueeze(0) - at::arange(queries, options).unsqueeze(1) - shift;
    return distance.lt(-before).logical_or(distance.gt(after));
}

// Which scores are left out, if any.
OptionalTensor left_out(const Inputs& in, const OptionalIntegerTensor& mask, const Setting& at) {
    TORCH_CHECK(at.mode == 0 || mask, "the sparse mode ", at.mode, " needs a mask");
    if (!mask) return std::nullopt;
    constexpr auto all = std::numeric_limits<std::int32_t>::max();
    if (at.mode >= 2) {
        require_triangle(*mask);
        if (at.mode == 4) return outside(in, at.before, at.after, true);
        return outside(in, all, 0, at.mode == 3);
    }
    Tensor given = mask->to(at::kBool);
    if (at.packed()) given = given.slice(-2, 0, in.query.size(2)).slice(-1, 0, in.key.size(2));
    if (at.mode == 1) return given;
    const auto beside = outside(in, at.before, at.after, false);
    TORCH_CHECK(given.size(-1) == beside.size(-1) && given.size(-2) == beside.size(-2), "the mask has shape ",
                mask->sizes(), ", the scores have rows and columns ", beside.sizes());
    return given.logical_or(beside);
}

Tensor scores(const Inputs& in, const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Setting& at) {
    auto scores = in.query.matmul(in.key.transpose(-1, -2));
    TORCH_CHECK(!pse || at::is_expandable_to(pse->sizes(), scores.sizes()), "pse has shape ",
                pse ? pse->sizes() : at::IntArrayRef(), ", the scores have ", scores.sizes());
    if (pse && at.pse_type == 1) scores = scores + *pse;
    scores = scores * at.scale;
    if (pse && at.pse_type == 0) scores = scores + *pse;
    const auto without = left_out(in, mask, at);
    TORCH_CHECK(!without || at::is_expandable_to(without->sizes(), scores.sizes()), "the mask has shape ",
                without ? without->sizes() : at::IntArrayRef(), ", the scores have ", scores.sizes());
    return without ? scores.masked_fill(*without, -std::numeric_limits<float>::infinity()) : scores;
}

// A query that attends to nothing has the result 0.
constexpr double kLeast = std::numeric_limits<float>::min();
constexpr double kLowest = std::numeric_limits<float>::lowest();

struct Forward {
    Tensor result, max, sum;
};

Forward attention(const Inputs& in, const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Setting& at) {
    const auto s = scores(in, pse, mask, at);
    const auto max = s.amax({-1}, true).clamp_min(kLowest);
    const auto weights = at::exp(s - max);
    const auto sum = weights.sum({-1}, true);
    return {(weights / sum.clamp_min(kLeast)).matmul(in.value), max, sum};
}

struct Gradients {
    Tensor query, key, value, pse;
};

Gradients gradients(const Inputs& in, const Tensor& dy, const Tensor& max, const Tensor& sum, const OptionalTensor& pse,
                    const OptionalIntegerTensor& mask, const Setting& at) {
    const auto p = at::exp(scores(in, pse, mask, at) - max) / sum.clamp_min(kLeast);
    const auto dp = dy.matmul(in.value.transpose(-1, -2));
    const auto ds = p * (dp - (p * dp).sum(-1, true));
    return {ds.matmul(in.key) * at.scale,
            sum_of_groups(ds.transpose(-1, -2).matmul(in.query) * at.scale, in.heads_of_keys),
            sum_of_groups(p.transpose(-1, -2).matmul(dy), in.heads_of_keys),
            pse ? (at.pse_type == 1 ? ds * at.scale : ds).sum_to_size(pse->sizes()) : Tensor()};
}

// The sequences of a packed batch, which end at `ends`.
std::vector<Tensor> sequences(const Tensor& x, const Ints& ends) {
    std::vector<Tensor> found;
    std::int64_t begin = 0;
    for (const auto end : ends) {
        TORCH_CHECK(end >= begin && end <= x.size(0), "a sequence ends at ", end, " of ", x.size(0), " tokens");
        found.push_back(x.slice(0, begin, end));
        begin = end;
    }
    TORCH_CHECK(begin == x.size(0), "the sequences have ", begin, " of ", x.size(0), " tokens");
    return found;
}

void attend(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
            const OptionalIntegerTensor& mask, const Setting& at, const Out& max, const Out& sum, const Out& out) {
    if (!at.packed()) {
        const auto [result, m, s] = attention(inputs(query, key, value, at), pse, mask, at);
        max = m.expand({-1, -1, -1, kColumns});
        sum = s.expand({-1, -1, -1, kColumns});
        out = in_layout(result, at.layout);
        return;
    }
    TORCH_CHECK(!pse, "the host NPU takes no pse in the layout TND");
    TORCH_CHECK(at.ends_of_queries.size() == at.ends_of_keys.size(), "queries and keys are not as many sequences");
    const auto q = sequences(query, at.ends_of_queries);
    const auto k = sequences(key, at.ends_of_keys), v = sequences(value, at.ends_of_keys);
    std::vector<Tensor> results, maxima, sums;
    for (std::size_t index = 0; index < q.size(); ++index) {
        const auto [result, m, s] = attention(inputs(q[index], k[index], v[index], at), pse, mask, at);
        results.push_back(in_layout(result, at.layout));
        maxima.push_back(in_layout(m, at.layout));
        sums.push_back(in_layout(s, at.layout));
    }
    max = at::cat(maxima).expand({-1, -1, kColumns});
    sum = at::cat(sums).expand({-1, -1, kColumns});
    out = at::cat(results);
}

void attend_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                     const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Tensor& max, const Tensor& sum,
                     const Setting& at, const Out& dq, const Out& dk, const Out& dv, const OptionalOut& dpse) {
    if (!at.packed()) {
        const auto grads = gradients(inputs(query, key, value, at), by_head(dy, at.layout, at.heads),
                                     max.narrow(-1, 0, 1), sum.narrow(-1, 0, 1), pse, mask, at);
        dq = in_layout(grads.query, at.layout);
        dk = in_layout(grads.key, at.layout);
        dv = in_layout(grads.value, at.layout);
        if (pse && dpse) *dpse = grads.pse;
        return;
    }
    TORCH_CHECK(!pse, "the host NPU takes no pse in the layout TND");
    TORCH_CHECK(at.ends_of_queries.size() == at.ends_of_keys.size(), "queries and keys are not as many sequences");
    const auto of_queries = [&](const Tensor& x) { return sequences(x, at.ends_of_queries); };
    const auto q = of_queries(query), d = of_queries(dy), m = of_queries(max.narrow(-1, 0, 1)),
               s = of_queries(sum.narrow(-1, 0, 1));
    const auto k = sequences(key, at.ends_of_keys), v = sequences(value, at.ends_of_keys);
    std::vector<Tensor> queries, keys, values;
    for (std::size_t index = 0; index < q.size(); ++index) {
        const auto head = [&](const Tensor& x) { return by_head(x, at.layout, at.heads); };
        const auto grads = gradients(inputs(q[index], k[index], v[index], at), head(d[index]), head(m[index]),
                                     head(s[index]), pse, mask, at);
        queries.push_back(in_layout(grads.query, at.layout));
        keys.push_back(in_layout(grads.key, at.layout));
        values.push_back(in_layout(grads.value, at.layout));
    }
    dq = at::cat(queries);
    dk = at::cat(keys);
    dv = at::cat(values);
}

void score(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
           const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
           const OptionalIntegerTensor& mask, const Ints&, double scale, double keep_prob, std::int64_t before,
           std::int64_t after, std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode,
           const Out& max, const Out& sum, const OptionalOut&, const Out& out) {
    const Setting at{scale, before, after, heads, layout, mode, 1};
    require_computed(at, keep_prob, drop_mask, padding_mask);
    attend(query, key, value, pse, mask, at, max, sum, out);
}
const Formula<"aclnnFlashAttentionScore", score> score_of_batches;

void score_v2(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
              const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
              const OptionalIntegerTensor& mask, const Ints&, const Ints&, const Ints&, double scale, double keep_prob,
              std::int64_t before, std::int64_t after, std::int64_t heads, const std::string& layout, std::int64_t,
              std::int64_t mode, std::int64_t pse_type, const Out& max, const Out& sum, const OptionalOut&,
              const Out& out) {
    const Setting at{scale, before, after, heads, layout, mode, pse_type};
    require_computed(at, keep_prob, drop_mask, padding_mask);
    attend(query, key, value, pse, mask, at, max, sum, out);
}
const Formula<"aclnnFlashAttentionScoreV2", score_v2> score_with_pse_type;

void score_packed(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
                  const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
                  const OptionalIntegerTensor& mask, const Ints&, const Ints& ends_of_queries, const Ints& ends_of_keys,
                  double scale, double keep_prob, std::int64_t before, std::int64_t after, std::int64_t heads,
                  const std::string& layout, std::int64_t, std::int64_t mode, const Out& max, const Out& sum,
                  const OptionalOut&, const Out& out) {
    const Setting at{scale, before, after, heads, layout, mode, 1, ends_of_queries, ends_of_keys};
    require_computed(at, keep_prob, drop_mask, padding_mask);
    attend(query, key, value, pse, mask, at, max, sum, out);
}
const Formula<"aclnnFlashAttentionVarLenScore", score_packed> score_of_sequences;

void score_grad(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask, const OptionalTensor& padding_mask,
                const OptionalIntegerTensor& mask, const Tensor& max, const Tensor& sum, const OptionalTensor&,
                const OptionalTensor&, const Ints&, double scale, double keep_prob, std::int64_t before,
                std::int64_t after, std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode,
                const Out& dq, const Out& dk, const Out& dv, const OptionalOut& dpse) {
    const Setting at{scale, before, after, heads, layout, mode, 1};
    require_computed(at, keep_prob, drop_mask, padding_mask);
    attend_backward(query, key, value, dy, pse, mask, max, sum, at, dq, dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionScoreGrad", score_grad> grad_of_batches;

void score_grad_v2(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                   const OptionalTensor& pse, const OptionalIntegerTensor& drop_mask,
                   const OptionalTensor& padding_mask, const OptionalIntegerTensor& mask, const Tensor& max,
                   const Tensor& sum, const OptionalTensor&, const OptionalTensor&, const Ints&, const Ints&,
                   const Ints&, double scale, double keep_prob, std::int64_t before, std::int64_t after,
                   std::int64_t heads, const std::string& layout, std::int64_t, std::int64_t mode,
                   std::int64_t pse_type, const Out& dq, const Out& dk, const Out& dv, const OptionalOut& dpse) {
    const Setting at{scale, before, after, heads, layout, mode, pse_type};
    require_computed(at, keep_prob, drop_mask, padding_mask);
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
    const Setting at{scale, before, after, heads, layout, mode, 1, ends_of_queries, ends_of_keys};
    require_computed(at, keep_prob, drop_mask, padding_mask);
    attend_backward(query, key, value, dy, pse, mask, max, sum, at, dq, dk, dv, dpse);
}
const Formula<"aclnnFlashAttentionUnpaddingScoreGrad", score_grad_packed> grad_of_sequences;

}  // namespace
}  // namespace host_npu
