// A step of Adam, shared by the operators that compute it.
#pragma once

#include "host_npu_formulas/formula.h"

namespace host_npu {

struct AdamStep {
    Tensor var, m, v;
};

// Returns the unchanged parameter and the moments after this gradient.
template <class Number>
AdamStep moments(const AdamStep& before, const Tensor& grad, const Number& beta1, const Number& beta2) {
    return {before.var, before.m * beta1 + grad * (1 - beta1), before.v * beta2 + grad * grad * (1 - beta2)};
}

// A step of AdamW. `largest`, if defined, is the running maximum of the second moment. Corrections are 1 - beta^t.
template <class Number>
AdamStep adam_w_step(const AdamStep& before, const Tensor& grad, const Tensor& largest, const Number& lr,
                     const Number& beta1, const Number& beta2, const Number& weight_decay, const Number& epsilon,
                     const Tensor& correction1, const Tensor& correction2) {
    auto after = moments(before, grad, beta1, beta2);
    const auto second = largest.defined() ? at::maximum(largest, after.v) : after.v;
    const auto denominator = at::sqrt(second) / at::sqrt(correction2) + epsilon;
    after.var = before.var * (1 - lr * weight_decay) - after.m / denominator * (lr / correction1);
    return after;
}

}  // namespace host_npu
