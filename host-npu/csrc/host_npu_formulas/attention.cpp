// Attention: the checks, shapes and layouts that follow from its arguments.
#include "host_npu_formulas/attention.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "host_npu_formulas/attention_masks.h"
#include "host_npu_formulas/dropout.h"

namespace host_npu {
namespace {

// CANN repeats each softmax statistic in this number of equal columns.
constexpr std::int64_t kColumns = 8;
// The number of rows of a compressed pse, from which CANN computes the others.
constexpr std::int64_t kCompressed = 1024;

void require_computed(const Setting& at) {
    TORCH_CHECK(at.keep_prob >= 0 && at.keep_prob <= 1 && (at.keep_prob == 1) == !at.drop_mask, "keep_prob is ",
                at.keep_prob, at.drop_mask ? " with" : " without",
                " a mask of dropout; it must be 1 without one, and otherwise at least 0 and below 1");
    TORCH_CHECK(at.mode >= 0 && at.mode <= 6, "the host NPU has the sparse modes 0 to 6 only, not ", at.mode);
    TORCH_CHECK(!at.sink || (at.sink->dim() == 1 && at.sink->size(0) == at.heads), "sink has shape ",
                at.sink ? at.sink->sizes() : at::IntArrayRef(), " instead of one number for each of ", at.heads,
                " heads");
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

// The expected shapes in the layout. Keys and values may differ in the head size only.
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

// Also checks the gradient's inputs: results and softmax statistics have all queries.
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

// `first` is the index of the first weight.
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

// Views x with as many dimensions as the scores.
Tensor of_scores(const Tensor& x, const Inputs& in, std::string_view name) {
    const std::array sizes{in.query.size(0), in.query.size(1), in.query.size(2), in.key.size(2)};
    const bool is_pse = name == "pse";
    // With three dimensions, the first would be ambiguous: batches or heads.
    TORCH_CHECK(x.dim() == 4 || (x.dim() == 2 && !is_pse), name, " has shape ", x.sizes(), "; CANN takes ",
                is_pse ? "4 dimensions" : "2 or 4 dimensions");
    TORCH_CHECK(x.dim() != 4 || x.size(2) != kCompressed || in.query.size(2) <= kCompressed || !is_pse,
                "the host NPU does not simulate the compression of ALiBi: pse has shape ", x.sizes(),
                " for scores of shape ", at::IntArrayRef(sizes));
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

// Splits a packed batch into its sequences, which end at `ends`.
std::vector<Tensor> sequences(const Tensor& x, const Ints& ends) {
    std::vector<Tensor> found;
    std::int64_t begin = 0;
    for (const auto end : ends) {
        found.push_back(x.slice(0, begin, end));
        begin = end;
    }
    return found;
}

// Trailing zeros in `ends` mark omitted sequences, whose tokens may remain at the end of x.
void require_ends_of_present(const char* name, const Ints& ends, const Ints& present, const char* of, const Tensor& x) {
    const bool are_all = ends.size() == present.size();
    TORCH_CHECK(!present.empty() && present.front() >= 0 && std::is_sorted(present.begin(), present.end()) &&
                    (present.back() == x.size(0) || (!are_all && present.back() < x.size(0))),
                name, " is ", at::IntArrayRef(ends), " for ", of, " of shape ", x.sizes(),
                "; CANN takes where each sequence ends, so that the numbers do not decrease and the last one is ",
                x.size(0), ", or zeros at the end for sequences that are left out");
}

void require_packed(const Tensor& query, const Tensor& key, const OptionalTensor& pse, const Setting& all,
                    const Setting& at) {
    TORCH_CHECK(!pse, "the host NPU takes no pse in the layout TND");
    require_ends_of_present("actualSeqQLen", all.ends_of_queries, at.ends_of_queries, "query", query);
    require_ends_of_present("actualSeqKvLen", all.ends_of_keys, at.ends_of_keys, "key", key);
    TORCH_CHECK(at.ends_of_queries.size() == at.ends_of_keys.size(), "actualSeqQLen has ", at.ends_of_queries.size(),
                " numbers and actualSeqKvLen ", at.ends_of_keys.size(),
                " without zeros at the end; CANN takes the same number of sequences");
}

// Concatenates the sequences and pads with rows of `value` to the length of `like`.
Tensor of_all_tokens(const std::vector<Tensor>& of_sequences, const Tensor& like, double value = 0) {
    const auto joined = at::cat(of_sequences);
    Ints padding(static_cast<std::size_t>(2 * joined.dim()), 0);
    padding.back() = like.size(0) - joined.size(0);
    return at::constant_pad_nd(joined, padding, value);
}

// Converts the statistics of a sequence from [1, heads, sequence, 1] to [sequence, heads, 1], and back.
Tensor packed_statistics(const Tensor& x, const Setting& at) {
    return at.softmax_layout.empty() ? x.reshape({x.size(2), x.size(1), 1}) : in_layout(x, at.layout);
}
Tensor statistics_by_head(const Tensor& x, const Setting& at) {
    return at.softmax_layout.empty() ? x.reshape({1, x.size(1), x.size(0), 1}) : by_head(x, at.layout, at.heads);
}

// The settings that take effect: without a mask the sparse mode is ignored (GetSparseInfo in CANN's
// flash_attention_score_tiling_general.cpp), and omitted sequences are removed.
Setting in_effect(const Setting& given, const OptionalIntegerTensor& mask) {
    auto at = given;
    TORCH_CHECK(at.mode >= 0 && at.mode <= 8, "sparseMode is ", at.mode, "; CANN takes 0 to 8");
    if (!mask) at.mode = 0;
    at.ends_of_queries = present(at.ends_of_queries);
    at.ends_of_keys = present(at.ends_of_keys);
    return at;
}

}  // namespace

Ints present(const Ints& ends) {
    const auto last = std::find_if(ends.rbegin(), ends.rend(), [](std::int64_t end) { return end != 0; });
    return last == ends.rend() ? ends : Ints(ends.begin(), last.base());
}

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
            const OptionalIntegerTensor& mask, const Setting& given, const Out& max, const Out& sum, const Out& out) {
    const auto at = in_effect(given, mask);
    require_computed(at);
    require_inputs(query, key, value, at);
    if (!at.packed()) {
        const auto [result, m, s] = attention(inputs(query, key, value, at), pse, mask, at);
        max = m.expand({-1, -1, -1, kColumns});
        sum = s.expand({-1, -1, -1, kColumns});
        out = in_layout(result, at.layout);
        return;
    }
    require_packed(query, key, pse, given, at);
    const auto q = sequences(query, at.ends_of_queries);
    const auto k = sequences(key, at.ends_of_keys), v = sequences(value, at.ends_of_keys);
    std::vector<Tensor> results, maxima, sums;
    std::int64_t first = 0;
    for (std::size_t index = 0; index < q.size(); ++index) {
        const auto [result, m, s] = attention(inputs(q[index], k[index], v[index], at, first), pse, mask, at);
        first += at.heads * q[index].size(0) * k[index].size(0);
        results.push_back(in_layout(result, at.layout));
        maxima.push_back(packed_statistics(m, at));
        sums.push_back(packed_statistics(s, at));
    }
    max = of_all_tokens(maxima, query, kLowest).expand({-1, -1, kColumns});
    sum = of_all_tokens(sums, query).expand({-1, -1, kColumns});
    out = of_all_tokens(results, query);
}

void attend_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                     const OptionalTensor& result, const OptionalTensor& pse, const OptionalIntegerTensor& mask,
                     const Tensor& max, const Tensor& sum, const Setting& given, const Out& dq, const Out& dk,
                     const Out& dv, const OptionalOut& dpse, const OptionalOut& dsink) {
    const auto at = in_effect(given, mask);
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
    require_packed(query, key, pse, given, at);
    const auto of_queries = [&](const Tensor& x) { return sequences(x, at.ends_of_queries); };
    const auto r = result ? of_queries(*result) : std::vector<Tensor>();
    const auto q = of_queries(query), d = of_queries(dy), m = of_queries(max.narrow(-1, 0, 1)),
               s = of_queries(sum.narrow(-1, 0, 1));
    const auto k = sequences(key, at.ends_of_keys), v = sequences(value, at.ends_of_keys);
    std::vector<Tensor> queries, keys, values;
    Tensor of_sink;
    std::int64_t first = 0;
    for (std::size_t index = 0; index < q.size(); ++index) {
        const auto head = [&](const Tensor& x) { return by_head(x, at.layout, at.heads); };
        const auto grads = gradients(inputs(q[index], k[index], v[index], at, first), head(d[index]),
                                     result ? OptionalTensor(head(r[index])) : std::nullopt,
                                     statistics_by_head(m[index], at), statistics_by_head(s[index], at), pse, mask, at);
        first += at.heads * q[index].size(0) * k[index].size(0);
        queries.push_back(in_layout(grads.query, at.layout));
        keys.push_back(in_layout(grads.key, at.layout));
        values.push_back(in_layout(grads.value, at.layout));
        if (at.sink) of_sink = of_sink.defined() ? of_sink + grads.sink : grads.sink;
    }
    if (at.sink && dsink) *dsink = of_sink;
    dq = of_all_tokens(queries, query);
    dk = of_all_tokens(keys, key);
    dv = of_all_tokens(values, value);
}

}  // namespace host_npu
