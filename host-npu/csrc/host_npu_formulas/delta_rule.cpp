// The gated delta rule: each head has a state that decays, is updated by keys and values, and is read by queries.
//
//     S = a S + b (v - a S k) k^T,  o = scale S q,  a = exp(g)
#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// Repeats the heads of keys or queries for the heads of values that share them.
Tensor for_values(const Tensor& x, const Tensor& value) {
    TORCH_CHECK(x.dim() == 3 && x.size(1) > 0 && value.size(1) % x.size(1) == 0, value.size(1),
                " heads of values cannot share those of shape ", x.sizes());
    return x.repeat_interleave(value.size(1) / x.size(1), 1);
}

struct Sequence {
    Tensor query, key, value, beta, decay;
    double scale;

    Sequence(const Tensor& q, const Tensor& k, const Tensor& value, const Tensor& beta, const OptionalTensor& g,
             double scale)
        : query(for_values(q, value)), key(for_values(k, value)), value(value), beta(beta), scale(scale) {
        TORCH_CHECK(value.dim() == 3 && beta.sizes() == value.sizes().slice(0, 2), "beta of shape ", beta.sizes(),
                    " does not fit values of shape ", value.sizes());
        TORCH_CHECK(!g || g->sizes() == beta.sizes(), "g and beta must have the same shape");
        decay = g ? at::exp(*g) : at::exp(beta * 0);
    }

    // Returns the state [heads, values, keys] after a token, and the token's output.
    std::pair<Tensor, Tensor> step(const Tensor& state, std::int64_t token) const {
        const auto kept = state * decay[token].view({-1, 1, 1});
        const auto known = at::einsum("hvk,hk->hv", {kept, key[token]});
        const auto learned = (value[token] - known) * beta[token].unsqueeze(-1);
        const auto next = kept + learned.unsqueeze(-1) * key[token].unsqueeze(1);
        return {next, at::einsum("hvk,hk->hv", {next, query[token]}) * scale};
    }
};

std::vector<std::int64_t> lengths_of(const Tensor& lengths, std::int64_t tokens) {
    const auto wide = lengths.to(at::kLong).contiguous();
    const auto* first = wide.const_data_ptr<std::int64_t>();
    std::int64_t sum = 0;
    for (std::int64_t index = 0; index < wide.numel(); ++index) sum += first[index];
    TORCH_CHECK(sum == tokens, "actual_seq_lengths have the sum ", sum, " of ", tokens, " tokens");
    return {first, first + wide.numel()};
}

void chunk_delta_rule(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& beta,
                      const Tensor& initial, const IntegerTensor& lengths, const OptionalTensor& g, float scale,
                      const Out& out, const Out& final_state) {
    const Sequence of(query, key, value, beta, g, scale);
    TORCH_CHECK(initial.dim() == 4 && initial.size(0) == lengths.numel(), "initial_state has shape ", initial.sizes(),
                " for ", lengths.numel(), " sequences");
    if (lengths.is_meta()) {
        of.step(initial[0], 0);
        out = value;
        final_state = initial;
        return;
    }
    std::vector<Tensor> results, states;
    std::int64_t token = 0;
    for (const auto length : lengths_of(lengths, value.size(0))) {
        auto state = initial[static_cast<std::int64_t>(states.size())];
        for (const auto end = token + length; token < end; ++token) {
            const auto [next, result] = of.step(state, token);
            state = next;
            results.push_back(result);
        }
        states.push_back(state);
    }
    out = at::stack(results);
    final_state = at::stack(states);
}
const Formula<"aclnnChunkGatedDeltaRule", chunk_delta_rule> delta_rule_of_sequences;

// Each token has a slot for the state after it. A sequence starts from the state of its last accepted token.
void recurrent_delta_rule(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& beta,
                          const Out& states, const IntegerTensor& lengths, const IntegerTensor& places,
                          const OptionalTensor& g, Without<"gk">, const OptionalIntegerTensor& accepted, float scale,
                          const Out& out) {
    const Sequence of(query, key, value, beta, g, scale);
    const auto& memory = states.in_place();
    TORCH_CHECK(memory.dim() == 4 && places.dim() == 1 && places.size(0) == value.size(0), "state has shape ",
                memory.sizes(), ", ssm_state_indices has ", places.sizes());
    if (lengths.is_meta()) {
        out = value;
        return;
    }
    const auto place = places.to(at::kLong);
    std::vector<Tensor> results;
    std::int64_t token = 0, sequence = 0;
    for (const auto length : lengths_of(lengths, value.size(0))) {
        const auto last = accepted ? (*accepted)[sequence].item<std::int64_t>() - 1 : 0;
        TORCH_CHECK(last >= 0 && last < std::max<std::int64_t>(length, 1), "sequence ", sequence, " has ", last + 1,
                    " accepted of ", length, " tokens");
        ++sequence;
        if (length == 0) continue;
        auto state = widened(memory[place[token + last].item<std::int64_t>()]);
        for (const auto end = token + length; token < end; ++token) {
            const auto [next, result] = of.step(state, token);
            state = next;
            memory[place[token].item<std::int64_t>()].copy_(state);
            results.push_back(result);
        }
    }
    out = at::stack(results);
}
const Formula<"aclnnRecurrentGatedDeltaRule", recurrent_delta_rule> delta_rule_of_tokens;

}  // namespace
}  // namespace host_npu
