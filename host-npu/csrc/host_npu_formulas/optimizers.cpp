// Optimizer steps, and the step of a decoder from one token to the next.
#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/sqrt.h>

#include "host_npu_formulas/formula.h"

namespace host_npu {
namespace {

// AdamW; `step` is the number of the steps before this one.
void apply_adam_w(const Out& var, const Out& m, const Out& v, const OptionalOut& largest, const Tensor& grad,
                  const AnyTensor& step, float lr, float beta1, float beta2, float weight_decay, float epsilon,
                  bool amsgrad, bool maximize) {
    TORCH_CHECK(step.numel() == 1, "step has ", step.numel(), " elements instead of 1");
    TORCH_CHECK(!amsgrad || largest, "amsgrad needs max_exp_avg_sqs");
    const auto g = maximize ? -grad : grad;
    const auto first = m.rounded() * beta1 + g * (1 - beta1);
    auto second = v.rounded() * beta2 + g * g * (1 - beta2);
    m = first;
    v = second;
    if (amsgrad) {
        second = at::maximum(largest->rounded(), second);
        *largest = second;
    }
    const auto number = step.reshape({}).to(at::kDouble) + 1;
    const auto correction1 = (1 - at::pow(static_cast<double>(beta1), number)).to(at::kFloat);
    const auto correction2 = (1 - at::pow(static_cast<double>(beta2), number)).to(at::kFloat);
    const auto denominator = at::sqrt(second) / at::sqrt(correction2) + epsilon;
    var = var.rounded() * (1 - lr * weight_decay) - first / denominator * (lr / correction1);
}
const Formula<"aclnnApplyAdamWV2", apply_adam_w> adam_w{
    {"varRef", kFloats, "...x"}, {"mRef", kFloats, "...x"},
    {"vRef", kFloats, "...x"},   {"maxGradNormOptionalRef", kFloats, "...x"},
    {"grad", kFloats, "...x"},   {"step", {ACL_INT64, ACL_FLOAT}, "1 |"},
};

// The first sequences, those of queries, get their sampled token, a place more, and the slot of that place. The others
// are padding: token 0 at place 0, without a slot; their lengths stay.
void advance_step(const Out& tokens, const IntegerTensor& sampled, const Out& positions, const Out& lengths,
                  const Out& slots, const IntegerTensor& tables, std::int64_t sequences, std::int64_t queries,
                  std::int64_t block_size) {
    TORCH_CHECK(queries <= sequences && queries <= sampled.size(0) && tables.dim() == 2 && block_size > 0, "there are ",
                queries, " queries of ", sequences, " sequences, with block_size ", block_size);
    const auto first = [&](const Out& out) { return out.in_place().slice(0, 0, queries); };
    const auto place = first(lengths).to(at::kLong).clone();
    const auto block = tables.slice(0, 0, queries).gather(1, place.div(block_size, "floor").unsqueeze(1)).squeeze(1);
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
