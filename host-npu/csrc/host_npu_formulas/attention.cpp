// What the arguments of attention say of its inputs and scores.
#include "host_npu_formulas/attention.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "host_npu_formulas/dropout.h"
#include "host_npu_formulas/halves.h"

namespace host_npu {
namespace {

// The number of equal columns that CANN gives each softmax statistic.
constexpr std::int64_t kColumns = 8;
// The rows and columns of the triangle that the modes 2 to 4 take as a mask.
constexpr std::int64_t kTriangle = 2048;

void require_computed(const Setting& at) {
    TORCH_CHECK(at.keep_prob >= 0 && at.keep_prob <= 1 && (at.keep_prob == 1) == !at.drop_mask,
                "attention takes a mask of dropout with a keep_prob in 0 to 1, which is ", at.keep_prob);
    TORCH_CHECK(at.mode >= 0 && at.mode <= 6, "the host NPU has the sparse modes 0 to 6 only, not ", at.mode);
    TORCH_CHECK(!at.sink || (at.sink->dim() == 1 && at.sink->size(0) == at.heads && !at.packed()),
                "the host NPU takes a sink of ", at.heads, " numbers, and none in the layout TND");
    TORCH_CHECK(at.mode < 5 || !at.packed(), "the host NPU has no prefixes in the layout TND");
    TORCH_CHECK(at.pse_type == 0 || at.pse_type == 1, "the host NPU has the pse types 0 and 1 only, not ", at.pse_type);
    TORCH_CHECK(at.layout == "BSH" || at.layout == "SBH" || at.layout == "BSND" || at.layout == "BNSD" || at.packed(),
                "the layout is ", at.layout, " instead of BSH, SBH, BSND, BNSD or TND");
}

Tensor sum_of_groups(const Tensor& grad, std::int64_t heads) { return grad.unflatten(1, {heads, -1}).sum(2); }

bool joins_heads(const Setting& at) { return at.layout == "BSH" || at.layout == "SBH"; }

std::int64_t key_heads(const Tensor& query, const Tensor& key, const Setting& at) {
    return joins_heads(at) ? key.size(-1) * at.heads / query.size(-1) : key.size(at.layout == "BSND" ? 2 : 1);
}

// What the layout says of the shapes: those of keys and values differ in the size of a head only.
std::vector<Shaped> shaped(const Tensor& query, const Tensor& key, const Tensor& value, const Setting& at) {
    return {{"query", query.sizes(), shape_in(at.layout, "1", "D", "H1")},
            {"key", key.sizes(), shape_in(at.layout, "2", "D", "H2")},
            {"value", value.sizes(), shape_in(at.layout, "2", "V", "W")}};
}

void require_heads(const Tensor& query, const Tensor& key, const Tensor& value, const Setting& at) {
    TORCH_CHECK(at.heads >= 1 && at.heads <= 256, "headNum is ", at.heads, "; CANN takes 1 to 256");
    if (!joins_heads(at)) {
        TORCH_CHECK(query.size(at.layout == "BSND" ? 2 : 1) == at.heads, "query has shape ", query.sizes(),
                    " in the layout ", at.layout, ", and headNum is ", at.heads, " instead of the number of its heads");
        return;
    }
    TORCH_CHECK(query.size(-1) >= at.heads && query.size(-1) % at.heads == 0, "query has shape ", query.sizes(),
                ", whose last dimension is not made of headNum, ", at.heads, ", heads");
    const auto size = query.size(-1) / at.heads;
    TORCH_CHECK(key.size(-1) % size == 0, "key has shape ", key.sizes(),
                ", whose last dimension is not a multiple of the size of query's heads, ", size);
    const auto heads = key.size(-1) / size;
    TORCH_CHECK(heads > 0 && value.size(-1) % heads == 0, "value has shape ", value.sizes(),
                ", whose last dimension is not a multiple of the number of key's heads, ", heads);
}

void require_inputs(const Tensor& query, const Tensor& key, const Tensor& value, const Setting& at) {
    require_shapes(shaped(query, key, value, at));
    require_heads(query, key, value, at);
    const auto keys = at.packed() ? 1 : key.size(at.layout == "BNSD" ? 2 : at.layout == "SBH" ? 0 : 1);
    TORCH_CHECK(keys > 0, "the host NPU computes attention of at least one key, but key has shape ", key.sizes());
}

// Those of the gradient besides: results and their statistics are of all queries.
void require_results(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                     const OptionalTensor& result, const Tensor& max, const Tensor& sum, const Setting& at) {
    auto all = shaped(query, key, value, at);
    const auto joined = joins_heads(at) ? value.size(-1) / key_heads(query, key, at) * at.heads : 0;
    const auto of_result = shape_in(at.layout, "1", "V", std::to_string(joined));
    const auto heads = std::to_string(at.heads), columns = " " + std::to_string(kColumns);
    const auto of_statistics = at.packed() ? "T1 " + heads + columns : "B " + heads + " S1" + columns;
    all.push_back({"dy", dy.sizes(), of_result});
    if (result) all.push_back({"attentionIn", result->sizes(), of_result});
    all.push_back({"softmaxMax", max.sizes(), of_statistics});
    all.push_back({"softmaxSum", sum.sizes(), of_statistics});
    require_shapes(all);
}

// `first` is the number of weights before these.
OptionalTensor dropout(const Tensor& query, const Tensor& key, const Setting& at, std::int64_t first) {
    if (!at.drop_mask) return std::nullopt;
    const std::array sizes{query.size(0), at.heads, query.size(2), key.size(2)};
    const auto count = c10::multiply_integers(sizes);
    const auto kept = kept_by(*at.drop_mask, first + count).slice(0, first).view(sizes);
    return at.keep_prob == 0 ? kept : kept / at.keep_prob;
}

Inputs inputs(const Tensor& query, const Tensor& key, const Tensor& value, const Setting& at, std::int64_t first = 0) {
    const auto q = by_head(query, at.layout, at.heads);
    TORCH_CHECK(q.size(3) <= 768, "the heads have ", q.size(3), " elements; CANN takes 1 to 768");
    const auto heads_of_keys = key_heads(query, key, at);
    const auto k = by_head(key, at.layout, heads_of_keys);
    const auto v = by_head(value, at.layout, heads_of_keys);
    TORCH_CHECK(v.size(3) <= k.size(3), "the heads of queries, keys and values have ", q.size(3), ", ", k.size(3),
                " and ", v.size(3),
                " elements; CANN takes as many for queries and keys, and at most as many for values");
    return {q, repeated(k, at.heads), repeated(v, at.heads), heads_of_keys, dropout(q, k, at, first)};
}

// A mask of the modes 2 to 4 is a triangle of 2048 rows, whatever the lengths: its first and its last row tell.
void require_triangle(const Tensor& mask) {
    TORCH_CHECK(mask.dim() >= 2 && mask.size(-1) == kTriangle && mask.size(-2) == kTriangle,
                "attenMask of the sparse modes 2 to 4 has shape ", mask.sizes(), " instead of ends of 2048 x 2048");
    if (mask.is_meta()) return;
    const auto last = mask.reshape({-1, kTriangle, kTriangle})[0][-1].to(at::kBool);
    const auto first = mask.reshape({-1, kTriangle, kTriangle})[0][0].to(at::kBool);
    TORCH_CHECK(!first[0].item<bool>() && first.slice(0, 1).all().item<bool>() && !last.any().item<bool>(),
                "attenMask of the sparse modes 2 to 4 is not the upper triangle without the diagonal");
}

// Where `distance` of key and query, from the first ones or the last ones, is outside of the band.
Tensor outside(const Inputs& in, std::int64_t before, std::int64_t after, bool from_the_last) {
    const auto options = in.query.options().dtype(at::kLong);
    const auto queries = in.query.size(2), keys = in.key.size(2);
    const auto shift = from_the_last ? keys - queries : 0;
    const auto distance = at::arange(keys, options).unsqueeze(0) - at::arange(queries, options).unsqueeze(1) - shift;
    return distance.lt(-before).logical_or(distance.gt(after));
}

// Causal from the last query and key, but for the first keys of each batch.
Tensor outside_of_prefix(const Inputs& in, const Ints& prefix) {
    const auto batches = in.query.size(0), keys = in.key.size(2);
    TORCH_CHECK(static_cast<std::int64_t>(prefix.size()) == batches, "prefix has ", prefix.size(),
                " numbers instead of one for each of ", batches, " batches");
    auto masks = outside(in, std::numeric_limits<std::int32_t>::max(), 0, true).repeat({batches, 1, 1, 1});
    for (std::int64_t batch = 0; batch < batches; ++batch) {
        const auto length = prefix[static_cast<std::size_t>(batch)];
        TORCH_CHECK(length >= 0 && length <= keys, "prefix is ", at::IntArrayRef(prefix), " for ", keys,
                    " keys; CANN takes 0 to this number");
        masks[batch].narrow(-1, 0, length).zero_();
    }
    return masks;
}

// The mask of mode 6 is the triangle above a block whose left half is attended to.
void require_prefix_mask(const Tensor& mask) {
    constexpr std::int64_t rows = 3072;
    TORCH_CHECK(mask.dim() >= 2 && mask.size(-1) == kTriangle && mask.size(-2) == rows,
                "attenMask of the sparse mode 6 has shape ", mask.sizes(), " instead of ends of 3072 x 2048");
    require_triangle(mask.slice(-2, 0, kTriangle));
    if (mask.is_meta()) return;
    const auto [left, right] = halves(mask.slice(-2, kTriangle).to(at::kBool), -1);
    TORCH_CHECK(!left.any().item<bool>() && right.all().item<bool>(),
                "attenMask of the sparse mode 6 does not end in rows of which the right half is left out");
}

// Mode 5 gives the whole mask, mode 6 a picture of it.
Tensor left_out_by_prefix(const Inputs& in, const Tensor& mask, const Setting& at) {
    const auto masks = outside_of_prefix(in, at.prefix);
    if (at.mode == 6) {
        require_prefix_mask(mask);
    } else {
        TORCH_CHECK(at::is_expandable_to(mask.sizes(), masks.sizes()) || mask.size(0) == masks.size(0),
                    "attenMask has shape ", mask.sizes(), ", which does not broadcast to that of the prefixes, ",
                    masks.sizes());
        TORCH_CHECK(mask.is_meta() || mask.to(at::kBool).eq(masks).all().item<bool>(),
                    "attenMask of the sparse mode 5 is not causal from the last but for the prefixes");
    }
    return masks;
}

// Which scores are left out, if any.
OptionalTensor left_out(const Inputs& in, const OptionalIntegerTensor& mask, const Setting& at) {
    TORCH_CHECK(at.mode == 0 || mask, "the sparse mode ", at.mode, " needs a mask, attenMask");
    if (!mask) return std::nullopt;
    constexpr auto all = std::numeric_limits<std::int32_t>::max();
    if (at.mode >= 5) return left_out_by_prefix(in, *mask, at);
    if (at.mode >= 2) {
        require_triangle(*mask);
        if (at.mode == 4) return outside(in, at.before, at.after, true);
        return outside(in, all, 0, at.mode == 3);
    }
    Tensor given = mask->to(at::kBool);
    if (at.packed() && given.dim() >= 2) given = given.slice(-2, 0, in.query.size(2)).slice(-1, 0, in.key.size(2));
    TORCH_CHECK(given.dim() >= 2 && given.size(-2) == in.query.size(2) && given.size(-1) == in.key.size(2),
                "attenMask has shape ", mask->sizes(), " instead of [..., ", in.query.size(2), ", ", in.key.size(2),
                "], a row for each query and a column for each key");
    return at.mode == 1 ? given : given.logical_or(outside(in, at.before, at.after, false));
}

// Keys may be attended to up to this difference of their number and their query's.
std::int64_t last_attended(const Inputs& in, const OptionalIntegerTensor& mask, const Setting& at) {
    const auto keys = in.key.size(2), shift = keys - in.query.size(2);
    if (!mask || at.mode == 1 || at.mode >= 5) return keys;
    if (at.mode == 2 || at.mode == 3) return at.mode == 2 ? 0 : shift;
    return std::min(at.after, keys) + (at.mode == 4 ? shift : 0);
}

// Views x with the number of dimensions that the scores have.
Tensor of_scores(const Tensor& x, const Inputs& in, std::string_view name) {
    const std::array sizes{in.query.size(0), in.query.size(1), in.query.size(2), in.key.size(2)};
    TORCH_CHECK(at::is_expandable_to(x.sizes(), sizes), name, " has shape ", x.sizes(),
                ", which does not broadcast to that of the scores, ", at::IntArrayRef(sizes));
    auto shape = x.sizes().vec();
    shape.insert(shape.begin(), sizes.size() - shape.size(), 1);
    return x.view(shape);
}

Scores scores(const Inputs& in, const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Setting& at) {
    Scores scores{.scale = at.scale, .last = last_attended(in, mask, at), .dropout = in.dropout, .sink = at.sink};
    if (pse) scores.summand = of_scores(at.pse_type == 1 ? *pse * at.scale : *pse, in, "pse");
    if (const auto without = left_out(in, mask, at)) scores.left_out = of_scores(*without, in, "attenMask");
    return scores;
}

Gradients gradients(const Inputs& in, const Tensor& dy, const OptionalTensor& result, const Tensor& max,
                    const Tensor& sum, const OptionalTensor& pse, const OptionalIntegerTensor& mask,
                    const Setting& at) {
    auto found = gradients_in_blocks(in.query, in.key, in.value, dy, result, max, sum, scores(in, pse, mask, at));
    found.key = sum_of_groups(found.key, in.heads_of_keys);
    found.value = sum_of_groups(found.value, in.heads_of_keys);
    if (pse) found.summand = (at.pse_type == 1 ? found.summand * at.scale : found.summand).view(pse->sizes());
    return found;
}

// The sequences of a packed batch, which end at `ends`.
std::vector<Tensor> sequences(const Tensor& x, const Ints& ends) {
    std::vector<Tensor> found;
    std::int64_t begin = 0;
    for (const auto end : ends) {
        found.push_back(x.slice(0, begin, end));
        begin = end;
    }
    return found;
}

void require_packed(const Tensor& query, const Tensor& key, const OptionalTensor& pse, const Setting& at) {
    TORCH_CHECK(!pse, "the host NPU takes no pse in the layout TND");
    require_ends("actualSeqQLen", at.ends_of_queries, "query", query);
    require_ends("actualSeqKvLen", at.ends_of_keys, "key", key);
    TORCH_CHECK(at.ends_of_queries.size() == at.ends_of_keys.size(), "actualSeqQLen has ", at.ends_of_queries.size(),
                " numbers and actualSeqKvLen ", at.ends_of_keys.size(), "; CANN takes the same number of sequences");
}

}  // namespace

std::string shape_in(const std::string& layout, const char* number, const std::string& size,
                     const std::string& joined) {
    std::string shape;
    for (const auto dimension : layout) {
        if (dimension == 'D') {
            shape += size;
        } else if (dimension == 'H') {
            shape += joined;
        } else {
            shape += dimension == 'B' ? "B" : dimension + std::string(number);
        }
        shape += ' ';
    }
    return shape;
}

void require_ends(const char* name, const Ints& ends, const char* of, const Tensor& x) {
    TORCH_CHECK(
        !ends.empty() && ends.front() >= 0 && std::is_sorted(ends.begin(), ends.end()) && ends.back() == x.size(0),
        name, " is ", at::IntArrayRef(ends), " for ", of, " of shape ", x.sizes(),
        "; CANN takes where each sequence ends, so that the numbers do not decrease and the last one is ", x.size(0));
}

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

Tensor repeated(const Tensor& x, std::int64_t heads) {
    TORCH_CHECK(x.size(1) > 0 && heads % x.size(1) == 0, heads, " heads of queries cannot share ", x.size(1));
    return x.unsqueeze(2).expand({-1, -1, heads / x.size(1), -1, -1}).flatten(1, 2);
}

Forward attention(const Inputs& in, const OptionalTensor& pse, const OptionalIntegerTensor& mask, const Setting& at) {
    return attend_in_blocks(in.query, in.key, in.value, scores(in, pse, mask, at));
}

void attend(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& pse,
            const OptionalIntegerTensor& mask, const Setting& at, const Out& max, const Out& sum, const Out& out) {
    require_computed(at);
    require_inputs(query, key, value, at);
    if (!at.packed()) {
        const auto [result, m, s] = attention(inputs(query, key, value, at), pse, mask, at);
        max = m.expand({-1, -1, -1, kColumns});
        sum = s.expand({-1, -1, -1, kColumns});
        out = in_layout(result, at.layout);
        return;
    }
    require_packed(query, key, pse, at);
    const auto q = sequences(query, at.ends_of_queries);
    const auto k = sequences(key, at.ends_of_keys), v = sequences(value, at.ends_of_keys);
    std::vector<Tensor> results, maxima, sums;
    std::int64_t first = 0;
    for (std::size_t index = 0; index < q.size(); ++index) {
        const auto [result, m, s] = attention(inputs(q[index], k[index], v[index], at, first), pse, mask, at);
        first += at.heads * q[index].size(0) * k[index].size(0);
        results.push_back(in_layout(result, at.layout));
        maxima.push_back(in_layout(m, at.layout));
        sums.push_back(in_layout(s, at.layout));
    }
    max = at::cat(maxima).expand({-1, -1, kColumns});
    sum = at::cat(sums).expand({-1, -1, kColumns});
    out = at::cat(results);
}

void attend_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                     const OptionalTensor& result, const OptionalTensor& pse, const OptionalIntegerTensor& mask,
                     const Tensor& max, const Tensor& sum, const Setting& at, const Out& dq, const Out& dk,
                     const Out& dv, const OptionalOut& dpse, const OptionalOut& dsink) {
    require_computed(at);
    require_inputs(query, key, value, at);
    require_results(query, key, value, dy, result, max, sum, at);
    if (!at.packed()) {
        const auto head = [&](const Tensor& x) { return by_head(x, at.layout, at.heads); };
        const auto grads =
            gradients(inputs(query, key, value, at), head(dy), result ? OptionalTensor(head(*result)) : std::nullopt,
                      max.narrow(-1, 0, 1), sum.narrow(-1, 0, 1), pse, mask, at);
        dq = in_layout(grads.query, at.layout);
        dk = in_layout(grads.key, at.layout);
        dv = in_layout(grads.value, at.layout);
        if (pse && dpse) *dpse = grads.summand;
        if (at.sink && dsink) *dsink = grads.sink;
        return;
    }
    require_packed(query, key, pse, at);
    const auto of_queries = [&](const Tensor& x) { return sequences(x, at.ends_of_queries); };
    const auto r = result ? of_queries(*result) : std::vector<Tensor>();
    const auto q = of_queries(query), d = of_queries(dy), m = of_queries(max.narrow(-1, 0, 1)),
               s = of_queries(sum.narrow(-1, 0, 1));
    const auto k = sequences(key, at.ends_of_keys), v = sequences(value, at.ends_of_keys);
    std::vector<Tensor> queries, keys, values;
    std::int64_t first = 0;
    for (std::size_t index = 0; index < q.size(); ++index) {
        const auto head = [&](const Tensor& x) { return by_head(x, at.layout, at.heads); };
        const auto grads = gradients(inputs(q[index], k[index], v[index], at, first), head(d[index]),
                                     result ? OptionalTensor(head(r[index])) : std::nullopt, head(m[index]),
                                     head(s[index]), pse, mask, at);
        first += at.heads * q[index].size(0) * k[index].size(0);
        queries.push_back(in_layout(grads.query, at.layout));
        keys.push_back(in_layout(grads.key, at.layout));
        values.push_back(in_layout(grads.value, at.layout));
    }
    dq = at::cat(queries);
    dk = at::cat(keys);
    dv = at::cat(values);
}

}  // namespace host_npu
