// Optimizer steps, and the advance of a decoder by one token.
#include "host_npu_formulas/adam.h"

namespace host_npu {
namespace {

// AdamW. `step` is the number of previous steps.
void apply_adam_w(const Out& var, const Out& m, const Out& v, const OptionalOut& largest, const Tensor& grad,
                  const AnyTensor& step, float lr, float beta1, float beta2, float weight_decay, float epsilon,
                  bool amsgrad, bool maximize) {
    TORCH_CHECK(step.numel() == 1, "step has ", step.numel(), " elements instead of 1");
    TORCH_CHECK(!amsgrad || largest, "amsgrad needs max_exp_avg_sqs");
    const auto number = step.reshape({}).to(at::kDouble) + 1;
    const auto correction = [&](double beta) { return (1 - at::pow(beta, number)).to(at::kFloat); };
    const auto before = amsgrad ? largest->rounded() : Tensor();
    const auto after = adam_w_step({var.rounded(), m.rounded(), v.rounded()}, maximize ? -grad : grad, before, lr,
                                   beta1, beta2, weight_decay, epsilon, correction(beta1), correction(beta2));
    var = after.var;
    m = after.m;
    v = after.v;
    if (amsgrad) *largest = at::maximum(before, after.v);
}
const Formula<"aclnnApplyAdamWV2", apply_adam_w> adam_w{
    {"varRef", kFloats, "...x"}, {"mRef", kFloats, "...x"},
    {"vRef", kFloats, "...x"},   {"maxGradNormOptionalRef", kFloats, "...x"},
    {"grad", kFloats, "...x"},   {"step", {ACL_INT64, ACL_FLOAT}, "1 |"},
};

// The same, given the powers of beta before this step. Keeps no maximum of the second moment.
void apply_adam_w_of_powers(const Out& var, const Out& m, const Out& v, const Tensor& power1, const Tensor& power2,
                            const Tensor& lr, const Tensor& weight_decay, const Tensor& beta1, const Tensor& beta2,
                            const Tensor& epsilon, const Tensor& grad, const OptionalTensor& largest, bool amsgrad,
                            bool maximize) {
    require(!amsgrad || largest, kNullPointer, "maxGradNormOptional is null, but amsgrad needs it");
    const auto after =
        adam_w_step({var.rounded(), m.rounded(), v.rounded()}, maximize ? -grad : grad, amsgrad ? *largest : Tensor(),
                    lr, beta1, beta2, weight_decay, epsilon, 1 - power1 * beta1, 1 - power2 * beta2);
    var = after.var;
    m = after.m;
    v = after.v;
}
const Formula<"aclnnApplyAdamW", apply_adam_w_of_powers> adam_w_of_powers{
    {"varRef", kFloats, "...x"},          {"mRef", as("varRef"), "...x"},
    {"vRef", as("varRef"), "...x"},       {"beta1Power", as("varRef"), "1 |"},
    {"beta2Power", as("varRef"), "1 |"},  {"lr", as("varRef"), "1 |"},
    {"weightDecay", as("varRef"), "1 |"}, {"beta1", as("varRef"), "1 |"},
    {"beta2", as("varRef"), "1 |"},       {"eps", as("varRef"), "1 |"},
    {"grad", as("varRef"), "...x"},       {"maxGradNormOptional", as("varRef"), "...x"},
};

// The first `queries` sequences get their sampled token, the next position and a slot. The others are padding: token 0
// at position 0, no slot, unchanged length. As in CANN's kernel and documents, the block of a slot is the
// entry of the table's first row plus the offset of the sequence's row; vLLM reads the entry of that row.
void advance_step(const Out& tokens, const IntegerTensor& sampled, const Out& positions, const Out& lengths,
                  const Out& slots, const IntegerTensor& tables, std::int64_t sequences, std::int64_t queries,
                  std::int64_t block_size) {
    TORCH_CHECK(queries <= sequences && queries <= sampled.size(0) && tables.dim() == 2 && block_size > 0, "there are ",
                queries, " queries of ", sequences, " sequences, with block_size ", block_size);
    const auto first = [&](const Out& out) { return out.in_place().slice(0, 0, queries); };
    const auto place = first(lengths).to(at::kLong).clone();
    const auto block = tables.flatten().index_select(0, place.div(block_size, "floor")) +
                       at::arange(queries, place.options()) * tables.size(1);
    first(tokens).copy_(sampled.slice(0, 0, queries).reshape({queries}));
    first(positions).copy_(place);
    first(lengths).copy_(place + 1);
    first(slots).copy_(block * block_size + place.remainder(block_size));
    const auto padding = [&](const Out& out) { return out.in_place().slice(0, queries, sequences); };
    padding(tokens).zero_();
    padding(positions).zero_();
    padding(slots).fill_(-1);
}
const Formula<"aclnnAdvanceStep", advance_step> next_tokens;

}  // namespace
}  // namespace host_npu
