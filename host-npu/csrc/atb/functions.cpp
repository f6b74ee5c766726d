// Loads from a cache, a gating of experts, and attention with a prefix.
#include "atb/called.h"

namespace atb {
namespace {

// Loads the tokens of sequences from blocks of a cache, sequence by sequence. A start is rounded down to its block.
Tensors loaded(const Tensors& in, bool is_cumulative) {
    const auto &keys = in[0], &values = in[1], &table = in[2];
    const auto given_lengths = numbers(in[3]);
    const auto starts = in.size() == 5 ? numbers(in[4]) : std::vector<std::int64_t>(given_lengths.size(), 0);
    std::vector<at::Tensor> slots;
    for (std::size_t index = is_cumulative ? 1 : 0; index < given_lengths.size(); ++index) {
        const auto length = given_lengths[index] - (is_cumulative ? given_lengths[index - 1] : 0);
        const auto sequence = static_cast<std::int64_t>(index) - (is_cumulative ? 1 : 0);
        const auto size = keys.size(1), start = starts.at(static_cast<std::size_t>(sequence)) / size * size;
        TORCH_CHECK(length >= 0 && start >= 0 && sequence < table.size(0) && start + length <= table.size(1) * size,
                    "block_table of shape ", table.sizes(), " does not have ", length, " tokens from ", start,
                    " in blocks of ", size);
        const auto blocks = table[sequence].to(at::kLong).unsqueeze(1) * size;
        slots.push_back((blocks + at::arange(size)).flatten().slice(0, start, start + length));
    }
    const auto all = slots.empty() ? at::zeros({0}, at::kLong) : at::cat(slots);
    return {at::index_select(keys.flatten(0, 1), 0, all), at::index_select(values.flatten(0, 1), 0, all)};
}

// Selects the experts with the largest biased scores within the best groups, and returns their scores.
struct AddTopkDiv {
    std::int64_t groups, group_topk, n, k;
    bool maps_experts, is_norm;
    float scale;

    void check(const Tensors& in, const Tensors& out) const {
        TORCH_CHECK(!maps_experts, "enable_expert_mapping is True; the host NPU takes False only");
        const auto &x = in[0], &bias = in[1];
        const auto dtype = x.scalar_type();
        TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "x has dtype ", dtype,
                    " instead of Float, Half or BFloat16");
        TORCH_CHECK(x.dim() == 2, "x has shape ", x.sizes(), " instead of [tokens, experts]");
        const auto experts = x.size(1);
        TORCH_CHECK(groups > 0 && experts % groups == 0 && experts <= (groups == 8 ? 256 : 32), "group_num is ", groups,
                    " for ", experts, " experts; ATB takes 8 groups of at most 32, or at most 32 experts in groups");
        const auto require = [](const char* name, std::int64_t value, std::int64_t most) {
            TORCH_CHECK(value > 0 && value <= most, name, " is ", value, " instead of 1 to ", most);
        };
        require("group_topk", group_topk, groups);
        require("n", n, experts / groups);
        require("k", k, experts);
        TORCH_CHECK(bias.scalar_type() == dtype && bias.sizes() == at::IntArrayRef(experts), "add_num has dtype ",
                    bias.scalar_type(), " and shape ", bias.sizes(), " instead of ", dtype, " and [", experts, "]");
        const at::IntArrayRef sizes[] = {out[0].sizes(), out[1].sizes()};
        TORCH_CHECK(out[0].scalar_type() == at::kFloat && out[1].scalar_type() == at::kInt && sizes[0] == sizes[1] &&
                        sizes[0] == at::IntArrayRef({x.size(0), k}),
                    "y and indices have dtypes ", out[0].scalar_type(), " and ", out[1].scalar_type(), " and shapes ",
                    sizes[0], " and ", sizes[1], " instead of Float, Int and [", x.size(0), ", ", k, "]");
    }

    Tensors compute(const Tensors& in) const {
        const infer::GroupTopkParam of_groups{static_cast<std::int32_t>(groups), static_cast<std::int32_t>(group_topk),
                                              1, static_cast<std::uint16_t>(n)};
        const auto scores = at::sigmoid(in[0].to(at::kFloat));
        const auto chosen = largest_columns(of_largest_groups(scores + in[1].to(at::kFloat), of_groups), k);
        const auto weights = scores.gather(1, chosen);
        return {is_norm ? weights / weights.sum(1, true) * scale : weights, chosen};
    }
};

}  // namespace
}  // namespace atb

extern "C" {
HOST_NPU_EXPORT int AtbPagedCacheLoadGetWorkspaceSize(const aclTensor* key_cache, const aclTensor* value_cache,
                                                      const aclTensor* table, const aclTensor* lengths,
                                                      const aclTensor* key, const aclTensor* value,
                                                      const aclTensor* starts, std::int8_t, bool is_cumulative, bool,
                                                      std::uint64_t* workspace_size, atb::Operation** operation,
                                                      atb::Context*) {
    const auto check = [is_cumulative](const atb::Tensors& in, const atb::Tensors&) {
        atb::require_int32("block_table", in[2]);
        atb::require_int32("context_lens", in[3]);
        if (in.size() < 5) return;
        atb::require_int32("seq_starts", in[4]);
        const auto sequences = in[3].numel() - (is_cumulative ? 1 : 0);
        TORCH_CHECK(in[4].numel() >= sequences, "seq_starts has ", in[4].numel(), " numbers for ", sequences,
                    " sequences");
    };
    return atb::begin({key_cache, value_cache, table, lengths, starts}, {}, {key, value}, "PagedCacheLoad",
                      {check, [is_cumulative](const atb::Tensors& in) { return atb::loaded(in, is_cumulative); }},
                      workspace_size, operation);
}

HOST_NPU_EXPORT int AtbPagedCacheLoad(void*, std::uint64_t, atb::Operation* operation, atb::Context* context) {
    return atb::run(operation, context);
}

HOST_NPU_EXPORT int AtbFusedAddTopkDivGetWorkspaceSize(const aclTensor* x, const aclTensor* bias, const aclTensor*,
                                                       const aclTensor*, std::uint32_t groups, std::uint32_t group_topk,
                                                       std::uint32_t n, std::uint32_t k, int, bool is_norm, float scale,
                                                       bool maps_experts, aclTensor* y, aclTensor* indices,
                                                       std::uint64_t* workspace_size, atb::Operation** operation,
                                                       atb::Context*) {
    const atb::AddTopkDiv chosen{groups, group_topk, n, k, maps_experts, is_norm, scale};
    return atb::begin({x, bias}, {}, {y, indices}, "FusedAddTopkDiv",
                      {[chosen](const atb::Tensors& in, const atb::Tensors& out) { chosen.check(in, out); },
                       [chosen](const atb::Tensors& in) { return chosen.compute(in); }},
                      workspace_size, operation);
}

HOST_NPU_EXPORT int AtbFusedAddTopkDiv(void*, std::uint64_t, atb::Operation* operation, atb::Context* context) {
    return atb::run(operation, context);
}

HOST_NPU_EXPORT int AtbSelfAttentionPrefixEncoderGetWorkspaceSize(
    const aclTensor* query, const aclTensor* key, const aclTensor* value, const aclTensor* table, const aclTensor*,
    const aclTensor* lengths, const aclTensor* contexts, const aclTensor*, int mask_type, std::int32_t heads,
    std::int32_t key_heads, float scale, aclTensor* result, std::uint64_t* workspace_size, atb::Operation** operation,
    atb::Context*) {
    using Param = atb::infer::SelfAttentionParam;
    Param parameters{};
    parameters.heads = heads;
    parameters.kv_heads = key_heads;
    parameters.query_scale = 1;
    parameters.scale = scale;
    parameters.kind = Param::Kind::kPrefixEncoder;
    parameters.mask = Param::Mask::kCausal;
    const auto formula = atb::formula_of(parameters);
    const auto check = [mask_type, formula](const atb::Tensors& in, const atb::Tensors& out) {
        TORCH_CHECK(mask_type == int(Param::Mask::kCausal), "mask_type is ", mask_type,
                    "; the host NPU takes mask_type_causal_mask (9)");
        formula.check(in, out);
        const auto prefixes = in[5] - in[4];
        TORCH_CHECK(prefixes.ge(0).logical_and(prefixes.remainder(128).eq(0)).all().item<bool>(), "kv_seqlen less ",
                    "seqlen is ", at::IntArrayRef(atb::numbers(prefixes)), "; ATB takes multiples of 128");
    };
    return atb::begin({query, key, value, table, lengths, contexts}, {lengths, contexts}, {result}, "SelfAttention",
                      {check, formula.compute}, workspace_size, operation);
}

HOST_NPU_EXPORT int AtbSelfAttentionPrefixEncoder(void*, std::uint64_t, atb::Operation* operation,
                                                  atb::Context* context) {
    return atb::run(operation, context);
}
}
