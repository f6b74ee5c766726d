// NsaSelectedAttention and its gradient: each query attends to chosen blocks of keys, which are the same for all heads
// that share a head of keys.
#include "host_npu_formulas/attention.h"

namespace host_npu {
namespace {

struct Selection {
    Tensor query, key, value;
    IntegerTensor indices;
    OptionalIntegerTensor mask;
    Ints ends_of_queries, ends_of_keys;
    double scale;
    std::int64_t heads, mode, block_size, block_count;
    std::string layout;

    // The heads of a query that share this head of keys.
    Tensor own(const Tensor& x, std::int64_t row, std::int64_t head) const {
        const auto group = query.size(1) / key.size(1);
        return x[row].narrow(0, head * group, group);
    }
    Tensor scores(std::int64_t row, std::int64_t head, const Tensor& keys) const {
        return at::matmul(own(query, row, head), key.select(1, head).index({keys}).t()) * scale;
    }
};

struct Selected : Selection {
    Out max, sum, result;
};

struct SelectedGrad : Selection {
    Tensor result, dy, max, sum;
    Out dq, dk, dv;
};

void require_selection(const Selection& in) {
    TORCH_CHECK(in.layout == "TND", "inputLayout is ", in.layout, "; CANN takes TND");
    TORCH_CHECK(!in.mask || (in.mode == 2 && in.mask->sizes() == at::IntArrayRef({2048, 2048})), "attenMask has shape ",
                in.mask ? in.mask->sizes() : at::IntArrayRef(), " and sparseMode is ", in.mode,
                "; the host NPU takes [2048, 2048] with 2");
    const auto size = in.block_size, count = in.block_count, keys = size * count;
    TORCH_CHECK(size > 0 && size <= 128 && size % 16 == 0 && count > 0 && count <= 128 && keys < 8192,
                "selectedBlockSize is ", size, " and selectedBlockCount ", count,
                "; CANN takes multiples of 16 up to 128, 1 to 128 blocks, and less than 8192 keys");
    TORCH_CHECK(in.indices.size(2) == count, "topkIndices has shape ", in.indices.sizes(),
                ", and selectedBlockCount is ", count);
    const auto heads = in.query.size(1), of_keys = in.key.size(1);
    TORCH_CHECK(of_keys > 0 && in.heads == heads && heads <= 128 && heads % of_keys == 0 && heads <= 32 * of_keys,
                "headNum is ", in.heads, ", and query and key have ", heads, " and ", of_keys,
                " heads; CANN takes up to 128 of queries, and up to 32 that share one of keys");
    require_ends("actualSeqQLen", in.ends_of_queries, "query", in.query);
    require_ends("actualSeqKvLen", in.ends_of_keys, "key", in.key);
    TORCH_CHECK(in.ends_of_queries.size() == in.ends_of_keys.size(), "actualSeqQLen has ", in.ends_of_queries.size(),
                " numbers and actualSeqKvLen ", in.ends_of_keys.size());
    std::int64_t begin = 0;
    for (const auto end : in.ends_of_keys) {
        TORCH_CHECK(end - begin >= keys && (end - begin) % size == 0, "a sequence has ", end - begin,
                    " keys; CANN takes multiples of selectedBlockSize, ", size, ", that are at least ", keys);
        begin = end;
    }
    TORCH_CHECK(!in.mask || in.mask->is_meta() || in.mask->ne(0).equal(at::ones_like(*in.mask, at::kBool).triu(1)),
                "the host NPU knows attenMask only if it is the upper triangle without the diagonal");
}

// Calls `body` with each query and head of keys and the indices of its keys, unless there are none.
template <class Body>
void for_each_choice(const Selection& in, const Body& body) {
    if (in.query.is_meta()) return;
    const auto indices = in.indices.to(at::kLong), within = at::arange(in.block_size);
    std::int64_t row = 0, first = 0;
    for (std::size_t number = 0; number < in.ends_of_queries.size(); ++number) {
        const auto begin = row, end = in.ends_of_queries[number],
                   blocks = (in.ends_of_keys[number] - first) / in.block_size;
        require_indices("topkIndices", indices.slice(0, begin, end), blocks);
        for (; row < end; ++row) {
            for (std::int64_t head = 0; head < in.key.size(1); ++head) {
                auto keys = (indices[row][head].unsqueeze(1) * in.block_size + within).flatten();
                if (in.mask) keys = keys.index({keys.le(row - begin)});
                if (keys.size(0) > 0) body(row, head, keys + first);
            }
        }
        first = in.ends_of_keys[number];
    }
}

void selected_attention(const Selected& in) {
    require_selection(in);
    const auto rows = in.query.size(0), heads = in.query.size(1);
    const auto out = at::zeros({rows, heads, in.value.size(2)}, in.query.options());
    const auto max = at::zeros({rows, heads, 1}, in.query.options()), sum = at::zeros_like(max);
    for_each_choice(in, [&](std::int64_t row, std::int64_t head, const Tensor& keys) {
        const auto scores = in.scores(row, head, keys), largest = scores.amax(-1, true);
        const auto weights = at::exp(scores - largest), total = weights.sum(-1, true);
        in.own(out, row, head).copy_(at::matmul(weights / total, in.value.select(1, head).index({keys})));
        in.own(max, row, head).copy_(largest);
        in.own(sum, row, head).copy_(total);
    });
    in.result = out;
    in.max = max.expand({-1, -1, 8});
    in.sum = sum.expand({-1, -1, 8});
}

void selected_attention_grad(const SelectedGrad& in) {
    require_selection(in);
    const auto dq = at::zeros_like(in.query), dk = at::zeros_like(in.key), dv = at::zeros_like(in.value);
    const auto max = in.max.narrow(-1, 0, 1), sum = in.sum.narrow(-1, 0, 1);
    for_each_choice(in, [&](std::int64_t row, std::int64_t head, const Tensor& keys) {
        const auto own = [&](const Tensor& x) { return in.own(x, row, head); };
        const auto weights = at::exp(in.scores(row, head, keys) - own(max)) / own(sum);
        const auto dweights = at::matmul(own(in.dy), in.value.select(1, head).index({keys}).t());
        const auto dscores = weights * (dweights - (own(in.dy) * own(in.result)).sum(-1, true)) * in.scale;
        own(dq).copy_(at::matmul(dscores, in.key.select(1, head).index({keys})));
        dk.select(1, head).index_add_(0, keys, at::matmul(dscores.t(), own(in.query)));
        dv.select(1, head).index_add_(0, keys, at::matmul(weights.t(), own(in.dy)));
    });
    in.dq = dq;
    in.dk = dk;
    in.dv = dv;
}

const TensorRule kSelectingQuery{"query", kHalves, "T1 N1 192"}, kSelectedKey{"key", as("query"), "T2 N2 192"};
const TensorRule kSelectedValue{"value", as("query"), "T2 N2 128"};
const TensorRule kSelectedBlocks{"topkIndices", {ACL_INT32}, "T1 N2 *"};
const TensorRule kSelectionMask{"attenMaskOptional", {ACL_BOOL, ACL_UINT8}, "* *"};
const TensorRule kSelectedMax{"softmaxMax", kFloat, "T1 N1 8"}, kSelectedSum{"softmaxSum", kFloat, "T1 N1 8"};
constexpr Members<&Selection::query, &Selection::key, &Selection::value> kSelectionInputs;
constexpr Members<&Selection::ends_of_queries, &Selection::ends_of_keys> kSelectionEnds;
const Formula<
    "aclnnNsaSelectedAttention",
    collected<selected_attention, kSelectionInputs, &Selection::indices, &Selection::mask, kSelectionEnds,
              &Selection::scale, &Selection::heads, &Selection::layout, &Selection::mode, &Selection::block_size,
              &Selection::block_count, &Selected::max, &Selected::sum, &Selected::result>>
    attention_to_selected_blocks{
        kSelectingQuery, kSelectedKey, kSelectedValue, kSelectedBlocks,
        kSelectionMask,  kSelectedMax, kSelectedSum,   {"attentionOut", as("query"), "T1 N1 128"}};
const Formula<"aclnnNsaSelectedAttentionGrad",
              collected<selected_attention_grad, kSelectionInputs, &SelectedGrad::result, &SelectedGrad::dy,
                        &SelectedGrad::max, &SelectedGrad::sum, &Selection::indices, kSelectionEnds, &Selection::mask,
                        &Selection::scale, &Selection::block_size, &Selection::block_count, &Selection::heads,
                        &Selection::layout, &Selection::mode, &SelectedGrad::dq, &SelectedGrad::dk, &SelectedGrad::dv>>
    attention_to_selected_blocks_backward{kSelectingQuery,
                                          kSelectedKey,
                                          kSelectedValue,
                                          {"attentionOut", as("query"), "T1 N1 128"},
                                          {"attentionOutGrad", as("query"), "T1 N1 128"},
                                          kSelectedMax,
                                          kSelectedSum,
                                          kSelectedBlocks,
                                          kSelectionMask,
                                          {"dqOut", as("query"), "T1 N1 192"},
                                          {"dkOut", as("query"), "T2 N2 192"},
                                          {"dvOut", as("query"), "T2 N2 128"}};

}  // namespace
}  // namespace host_npu
