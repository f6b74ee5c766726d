// aclnnApplyFusedEmaAdam against an evaluation in double precision.
#include "tests/calls.h"
#include "tests/reference.h"

namespace {

using namespace test;

void expect_adam(aclDataType dtype, std::int64_t mode, bool bias_correction, bool strided) {
    const Shape shape{3, 700};
    const auto count = numel(shape);
    auto var = random_values(dtype, count, -1, 1, 1), m = random_values(dtype, count, -1, 1, 2);
    auto v = random_values(dtype, count, 0, 2, 3), s = random_values(dtype, count, -1, 1, 4);
    const auto grad = random_values(dtype, count, -1, 1, 5);
    EmaAdam call;
    const View view = strided ? View{.strides = Shape{1, 3}} : View{};
    call.grad = {dtype, shape, grad, view};
    call.var = {dtype, shape, var, view};
    call.m = {dtype, shape, m, view};
    call.v = {dtype, shape, v, view};
    call.s = {dtype, shape, s, view};
    call.mode = mode;
    call.bias_correction = bias_correction;
    call.lr = 0.01;
    call.ema_decay = 0.9;
    call.weight_decay = 0.1;
    call.step = {ACL_INT64, {1}, {7}};
    run(call);
    const double c1 = bias_correction ? 1 - std::pow(call.beta1, 7) : 1,
                 c2 = bias_correction ? 1 - std::pow(call.beta2, 7) : 1;
    for (std::size_t index = 0; index < grad.size(); ++index) {
        // In a mode that does not exist, the gradient takes the parameter's place.
        const double old = mode == 0 || mode == 1 ? var[index] : grad[index];
        const double g = mode == 0 ? grad[index] + call.weight_decay * old : grad[index];
        m[index] = call.beta1 * m[index] + (1 - call.beta1) * g;
        v[index] = call.beta2 * v[index] + (1 - call.beta2) * g * g;
        const double change = m[index] / c1 / (std::sqrt(v[index] / c2) + call.eps);
        var[index] = old - call.lr * (mode == 1 ? change + call.weight_decay * old : change);
        s[index] = call.ema_decay * s[index] + (1 - call.ema_decay) * var[index];
    }
    // 1 - beta2 loses digits in single precision.
    const double tolerance = std::max(epsilon(dtype), 2e-5);
    expect_close(call.var.values(), var, tolerance, "varRef");
    expect_close(call.m.values(), m, tolerance, "mRef");
    expect_close(call.v.values(), v, tolerance, "vRef");
    expect_close(call.s.values(), s, tolerance, "sRef");
}

const Case adam{"numerics/apply_fused_ema_adam", [] {
                    for (const auto dtype : kFloatTypes) {
                        for (const std::int64_t mode : {0, 1, 2}) {
                            for (const bool bias_correction : {false, true}) {
                                expect_adam(dtype, mode, bias_correction, false);
                                expect_adam(dtype, mode, bias_correction, true);
                            }
                        }
                    }
                }};

const Case single_precision{"numerics/apply_fused_ema_adam_subtracts_beta_in_float32", [] {
                                EmaAdam call;
                                call.v = floats({2, 2, 2}, {0});
                                call.grad = floats({2, 2, 2}, {1});
                                run(call);
                                const double one_minus_beta2 = 1.0f - 0.999f;
                                expect_close(call.v.values(), std::vector<double>(8, one_minus_beta2), 0, "vRef");
                            }};

const Case step_zero{"numerics/apply_fused_ema_adam_at_step_0", [] {
                         EmaAdam call;
                         call.step = {ACL_INT64, {1}, {0}};
                         run(call);
                         for (const double value : call.var.values())
                             expect(!std::isfinite(value), "varRef has ", value);
                     }};

}  // namespace
