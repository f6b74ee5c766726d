// SelfAttention and PagedAttention of ATB, over packed sequences of different lengths.
#include <limits>
#include <memory>
#include <optional>

#include "atb/computed.h"

namespace atb {
namespace {

using Mask = std::optional<at::Tensor>;

// Queries `begin` to `begin + rows` attend to `context` keys.
struct Sequence {
    std::int64_t index;
    std::int64_t begin;
    std::int64_t rows;
    std::int64_t context;
};

template <class Parameters>
std::int64_t kv_heads(const Parameters& parameters) {
    return parameters.kv_heads ? parameters.kv_heads : parameters.heads;
}

// Heads are a dimension of their own, or one dimension with their elements.
void require_heads(const char* name, const at::Tensor& tensor, std::int64_t dimension, std::int64_t heads) {
    TORCH_CHECK(
        heads > 0 && tensor.dim() > dimension &&
            (tensor.dim() == dimension + 1 ? tensor.size(dimension) % heads == 0 : tensor.size(dimension) == heads),
        name, " of shape ", tensor.sizes(), " is not made of ", heads, " heads");
}

at::Tensor in_heads(const at::Tensor& tensor, std::int64_t heads) {
    return tensor.flatten(1).unflatten(1, {heads, -1}).to(at::kFloat);
}

// -10000 in bfloat16.
constexpr double kLeftOut = -9984;

// The additive mask. In bfloat16, ATB's masks may mark masked keys with 1, which becomes minus infinity.
at::Tensor added(const at::Tensor& mask) {
    const auto values = mask.to(at::kFloat);
    if (mask.scalar_type() != at::kBFloat16) return values;
    const auto is_out = values.eq(1).logical_or(values.le(kLeftOut));
    TORCH_CHECK(values.eq(0).logical_or(is_out).all().item<bool>(),
                "the host NPU knows masks in bfloat16 of 0 (kept), and 1 or at most -10000 (left out), only");
    return at::where(is_out, at::full_like(values, -std::numeric_limits<float>::infinity()), values);
}

// A causal mask; the last query is aligned with the last key.
at::Tensor causal(const at::Tensor& queries, std::int64_t keys) {
    const auto row = at::arange(queries.size(0), queries.options()).unsqueeze(1) + (keys - queries.size(0));
    const auto is_after = at::arange(keys, queries.options()).gt(row);
    return at::where(is_after, at::full_like(is_after, -std::numeric_limits<float>::infinity(), queries.options()), 0);
}

// A mask for any length must be the upper triangle, like `causal`.
void require_triangular(const at::Tensor& mask) {
    TORCH_CHECK(mask.dim() >= 2 && mask.size(-1) > 0 && mask.ne(0).equal(mask.ne(0).triu(1)) &&
                    mask.ne(0).sum().item<std::int64_t>() == mask.numel() / mask.size(-1) * (mask.size(-1) - 1) / 2,
                "the host NPU knows a compressed mask only if it is the upper triangle without the diagonal");
}

// Attention of one sequence: queries (tokens, heads, size), keys and values (tokens, fewer heads, size).
at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, double scale,
                  const Mask& mask) {
    const auto repeats = queries.size(1) / keys.size(1);
    const auto of_query = [&](const at::Tensor& tensor) {
        return tensor.repeat_interleave(repeats, 1).transpose(0, 1);
    };
    auto scores = at::matmul(queries.transpose(0, 1), of_query(keys).transpose(1, 2)) * scale;
    if (mask) scores = scores + *mask;
    return at::matmul(at::softmax(scores, -1), of_query(values)).transpose(0, 1);
}

enum class Masking { kNone, kSquare, kRows, kCausal, kBias };

// The positions of the optional inputs. Without values, the first elements of the keys are used.
struct Places {
    std::optional<std::size_t> values, table, mask, rows, contexts;
};

struct Attention {
    std::int64_t heads;
    std::int64_t kv_heads;
    double scale;
    Masking masking;
    Places places;
    std::int64_t value_size = 0;

    void check(const Tensors& inputs, const Tensors& outputs) const;
    Tensors compute(const Tensors& inputs) const;

  private:
    void require_keys(const Tensors& inputs) const;
    // The tokens of a sequence in a packed tensor or in a cache (blocks, tokens of a block, heads, size).
    at::Tensor tokens(const Tensors& inputs, std::size_t place, const Sequence& sequence) const;
    Mask mask(const Tensors& inputs, const at::Tensor& queries, const Sequence& sequence) const;
    std::vector<Sequence> sequences(const Tensors& inputs) const;
};

std::vector<Sequence> Attention::sequences(const Tensors& inputs) const {
    for (const auto& place : {places.rows, places.contexts}) {
        TORCH_CHECK(!place || !inputs.at(*place).is_meta(),
                    "the lengths of the sequences (seq_len, context_lens) must be CPU tensors, but are on the NPU");
    }
    const auto contexts = numbers(inputs[*(places.contexts ? places.contexts : places.rows)]);
    const auto rows = places.rows ? numbers(inputs[*places.rows]) : std::vector<std::int64_t>(contexts.size(), 1);
    TORCH_CHECK(rows.size() == contexts.size(), "seq_len has ", rows.size(), " lengths and context_lens has ",
                contexts.size());
    std::vector<Sequence> all;
    std::int64_t begin = 0;
    for (std::size_t index = 0; index < rows.size(); ++index) {
        all.push_back({std::int64_t(index), begin, rows[index], contexts[index]});
        begin += rows[index];
    }
    TORCH_CHECK(begin == inputs[0].size(0), "the lengths are those of ", begin, " tokens, and query has ",
                inputs[0].size(0));
    return all;
}

// Keys and values must have the same tokens and heads.
void Attention::require_keys(const Tensors& inputs) const {
    const auto& keys = inputs.at(1);
    require_heads("key", keys, places.table ? 2 : 1, kv_heads);
    if (!places.values) return;
    const auto& values = inputs.at(*places.values);
    require_heads("value", values, places.table ? 2 : 1, kv_heads);
    const auto of_tokens = places.table ? 2 : 1;
    TORCH_CHECK(keys.sizes().slice(0, of_tokens) == values.sizes().slice(0, of_tokens), "value has shape ",
                values.sizes(), ", which does not have the tokens of key, of shape ", keys.sizes());
    if (places.table) return;
    std::int64_t tokens = 0;
    for (const auto& sequence : sequences(inputs)) tokens += sequence.context;
    TORCH_CHECK(keys.size(0) == tokens, "the lengths are those of ", tokens, " tokens, and key has ", keys.size(0));
}

void Attention::check(const Tensors& inputs, const Tensors& outputs) const {
    if (places.table) require_int32("block_table", inputs.at(*places.table));
    if (places.rows) require_int32("seq_len", inputs.at(*places.rows));
    if (places.contexts) require_int32("context_lens", inputs.at(*places.contexts));
    require_heads("query", inputs.at(0), 1, heads);
    require_keys(inputs);
    TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, heads, " heads of queries do not share ", kv_heads,
                " heads of keys");
    const auto all_sequences = sequences(inputs);
    for (const auto& sequence : all_sequences) {
        if (places.table) {
            const auto &cache = inputs[1], &table = inputs.at(*places.table);
            TORCH_CHECK(cache.dim() >= 3 && cache.size(1) > 0 && table.dim() == 2 && sequence.index < table.size(0) &&
                            sequence.context <= table.size(1) * cache.size(1),
                        "a sequence of ", sequence.context, " tokens does not fit a cache of shape ", cache.sizes(),
                        " with a block_table of shape ", table.sizes());
        }
        if (places.mask && masking != Masking::kCausal) {
            const auto& all = inputs.at(*places.mask);
            const auto rows = masking == Masking::kRows ? sequence.begin + sequence.rows : sequence.rows;
            TORCH_CHECK(all.scalar_type() == inputs[0].scalar_type(), "mask, which is added to the scores, has dtype ",
                        all.scalar_type(), " instead of that of query, ", inputs[0].scalar_type());
            TORCH_CHECK(all.dim() >= 2 && all.size(-2) >= rows && all.size(-1) >= sequence.context, "mask has shape ",
                        all.sizes(), ", which is too small for ", rows, " rows and ", sequence.context, " keys");
            const bool is_of_each = masking == Masking::kSquare && all.dim() == 3 &&
                                    all.size(0) == static_cast<std::int64_t>(all_sequences.size());
            TORCH_CHECK(masking == Masking::kBias || all.dim() == 2 || is_of_each, "mask has shape ", all.sizes(),
                        " instead of [rows, keys]",
                        masking == Masking::kSquare ? " or [sequences, rows, keys]" : ", the rows of all sequences");
            const bool is_of_heads = (all.dim() == 3 || (all.dim() == 4 && sequence.index < all.size(0))) &&
                                     all.size(-3) == heads && all.size(-2) == 1;
            TORCH_CHECK(masking != Masking::kBias || is_of_heads, "mask has shape ", all.sizes(),
                        " instead of [sequences, ", heads, ", 1, keys] or [", heads, ", 1, keys]");
        }
    }
    const auto count = outputs.at(0).numel(), rows = inputs[0].size(0);
    TORCH_CHECK(rows == 0 ? count == 0 : count % rows == 0, "out has shape ", outputs[0].sizes(),
                " for queries of shape ", inputs[0].sizes());
}

at::Tensor Attention::tokens(const Tensors& inputs, std::size_t place, const Sequence& sequence) const {
    const auto& all = inputs[place];
    if (!places.table) return in_heads(all.slice(0, sequence.begin, sequence.begin + sequence.context), kv_heads);
    const auto blocks = inputs[*places.table].select(0, sequence.index);
    const auto used = (sequence.context + all.size(1) - 1) / all.size(1);
    const auto gathered = at::index_select(all, 0, blocks.slice(0, 0, used)).flatten(0, 1);
    return in_heads(gathered.slice(0, 0, sequence.context), kv_heads);
}

Mask Attention::mask(const Tensors& inputs, const at::Tensor& queries, const Sequence& sequence) const {
    if (masking == Masking::kNone) return std::nullopt;
    if (masking == Masking::kCausal) return causal(queries, sequence.context);
    const auto& all = inputs[*places.mask];
    // A bias (sequences or none, heads, 1, keys), which is added as it is, also in bfloat16.
    if (masking == Masking::kBias) {
        return (all.dim() == 4 ? all.select(0, sequence.index) : all).slice(2, 0, sequence.context).to(at::kFloat);
    }
    const auto of_sequence = all.dim() == 3 ? all.select(0, sequence.index) : all;
    const auto begin = masking == Masking::kRows ? sequence.begin : 0;
    return added(of_sequence.slice(0, begin, begin + sequence.rows).slice(1, 0, sequence.context));
}

Tensors Attention::compute(const Tensors& inputs) const {
    if (masking == Masking::kCausal && places.mask) require_triangular(inputs[*places.mask]);
    Tensors outputs;
    for (const auto& sequence : sequences(inputs)) {
        const auto queries = in_heads(inputs[0].slice(0, sequence.begin, sequence.begin + sequence.rows), heads);
        const auto keys = tokens(inputs, 1, sequence);
        const auto values = places.values ? tokens(inputs, *places.values, sequence) : keys.slice(2, 0, value_size);
        outputs.push_back(attend(queries, keys, values, scale, mask(inputs, queries, sequence)));
    }
    if (outputs.empty()) return {inputs[0]};
    return {at::cat(outputs)};
}

Formula formula_of(const Attention& attention) {
    return {[attention](const Tensors& in, const Tensors& out) { attention.check(in, out); },
            [attention](const Tensors& in) { return attention.compute(in); }};
}

}  // namespace

Formula formula_of(const infer::SelfAttentionParam& parameters) {
    using Param = infer::SelfAttentionParam;
    const bool has_prefix = parameters.kind == Param::Kind::kPrefixEncoder;
    const bool has_no_mask = has_prefix && parameters.mask == Param::Mask::kCausal;
    const bool is_compressed = has_no_mask || parameters.mask == Param::Mask::kNormCompressed;
    require_simulated(parameters.quantization == 0, "SelfAttention with quantization");
    require_simulated(has_prefix || parameters.kind == Param::Kind::kPagedEncoder,
                      "SelfAttention with calcType " + std::to_string(int(parameters.kind)));
    require_simulated(is_compressed || (!has_prefix && parameters.mask <= Param::Mask::kNorm),
                      "SelfAttention with maskType " + std::to_string(int(parameters.mask)));
    require_simulated(parameters.query_scale == 1 && parameters.clamp_type == 0 && parameters.cache == 0 &&
                          parameters.scale_type == 0 && parameters.layout == 0 && parameters.mla_value_size == 0 &&
                          parameters.cache_type == 0 && parameters.window == 0 && !parameters.has_batch_status,
                      "SelfAttention with a query scale, clamping, a sliding window, MLA or another layout than BSND");
    const auto masking = is_compressed                           ? Masking::kCausal
                         : parameters.mask == Param::Mask::kNorm ? Masking::kSquare
                                                                 : Masking::kNone;
    const Places with_prefix{.values = 2, .table = 3, .mask = 4, .rows = 5, .contexts = 6};
    const Places with_prefix_alone{.values = 2, .table = 3, .mask = {}, .rows = 4, .contexts = 5};
    const Places with_mask{.values = 2, .table = {}, .mask = 3, .rows = 4, .contexts = {}};
    const Places without_mask{.values = 2, .table = {}, .mask = {}, .rows = 3, .contexts = {}};
    return formula_of(Attention{parameters.heads, kv_heads(parameters), parameters.scale, masking,
                                has_no_mask                 ? with_prefix_alone
                                : has_prefix                ? with_prefix
                                : masking == Masking::kNone ? without_mask
                                                            : with_mask});
}

template <>
HOST_NPU_EXPORT Status CreateOperation(const infer::SelfAttentionParam& parameters, Operation** operation) {
    *operation = new Computed("SelfAttention", formula_of(parameters));
    return 0;
}

template <>
HOST_NPU_EXPORT Status CreateOperation(const infer::PagedAttentionParam& parameters, Operation** operation) {
    using Mask = infer::PagedAttentionParam::Mask;
    require_simulated(parameters.quantization == 0, "PagedAttention with quantization");
    const bool has_bias = parameters.mask == Mask::kAlibi && !parameters.has_lengths && parameters.mla_value_size == 0;
    require_simulated(has_bias || parameters.mask == (parameters.has_lengths ? Mask::kSpec : Mask::kNone),
                      "PagedAttention with maskType " + std::to_string(int(parameters.mask)));
    require_simulated(parameters.compression == 0 && parameters.scale_type == 0 && parameters.layout == 0 &&
                          !parameters.has_batch_status && !(parameters.mla_value_size > 0 && parameters.has_lengths),
                      "PagedAttention with compression, a logarithmic scale or another layout than BSND");
    const Places of_keys{.values = {}, .table = 2, .mask = {}, .rows = {}, .contexts = 3};
    const Places of_one{.values = 2, .table = 3, .mask = {}, .rows = {}, .contexts = 4};
    const Places with_bias{.values = 2, .table = 3, .mask = 5, .rows = {}, .contexts = 4};
    const Places of_several{.values = 2, .table = 3, .mask = 5, .rows = 6, .contexts = 4};
    const auto masking = parameters.has_lengths ? Masking::kRows : has_bias ? Masking::kBias : Masking::kNone;
    *operation = new Computed("PagedAttention",
                              formula_of(Attention{parameters.heads, kv_heads(parameters), parameters.scale, masking,
                                                   parameters.mla_value_size > 0 ? of_keys
                                                   : has_bias                    ? with_bias
                                                   : parameters.has_lengths      ? of_several
                                                                                 : of_one,
                                                   parameters.mla_value_size}));
    return 0;
}

}  // namespace atb
