// The examples of the operators' documents print these numbers.
#include "tests/calls.h"

namespace {

using namespace test;

const Case mse_loss{"examples/mse_loss",
                    [] {
                        MseLoss call;
                        run(call);
                        expect_close(call.out.values(), {1.5}, 0, "out");
                    },
                    kAllSocs};

const Case mse_loss_backward{"examples/mse_loss_backward",
                             [] {
                                 MseLossBackward call;
                                 run(call);
                                 expect_close(call.out.values(), {0, 0, 1, 3}, 0, "out");
                             },
                             kAllSocs};

const Case binary_cross_entropy{"examples/binary_cross_entropy",
                                [] {
                                    BinaryCrossEntropy call;
                                    run(call);
                                    expect_close(call.out.values(), {0.780324, 0.780324, 0.780324, 0.780324}, 1e-6,
                                                 "out");
                                },
                                kAllSocs};

const Case binary_cross_entropy_backward{"examples/binary_cross_entropy_backward",
                                         [] {
                                             BinaryCrossEntropyBackward call;
                                             run(call);
                                             expect_close(call.out.values(),
                                                          {-0.095238, -0.095238, -0.095238, -0.095238}, 1e-6, "out");
                                         },
                                         kAllSocs};

const Case embedding{"examples/embedding",
                     [] {
                         Embedding call;
                         run(call);
                         expect_close(call.out.values(), counting(12, 4), 0, "out");
                     },
                     kAllSocs};

const Case embedding_dense_backward{"examples/embedding_dense_backward",
                                    [] {
                                        EmbeddingDenseBackward call;
                                        run(call);
                                        expect_close(call.out.values(), {0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0}, 0, "out");
                                    },
                                    {"Ascend910", "Ascend910B", "Ascend910_93", "Ascend950"}};

const Case fused_linear_online_max_sum{"examples/fused_linear_online_max_sum", [] {
                                           OnlineMaxSum call;
                                           run(call);
                                           expect_close(call.max.values(), {4, 4, 4}, 0, "logitsMaxLocalOut");
                                           expect_close(call.sum.values(), {5, 5, 5}, 0, "sumExpLogitsLocalOut");
                                           expect_close(call.predicted.values(), {0, 0, 0}, 0, "predictedLogits");
                                           expect_close(call.mask.values(), {0}, 0, "targetMaskOut");
                                           expect_close(call.masked_target.values(), {1, 1, 1}, 0, "maskedTargetOut");
                                           expect_close(call.logits.values(), std::vector<double>(15, 4), 0, "logits");
                                       }};

const Case fused_cross_entropy_loss_with_max_sum{
    "examples/fused_cross_entropy_loss_with_max_sum", [] {
        LossWithMaxSum call;
        run(call);
        expect_close(call.loss.values(), {-1.193147, -1.0}, 1e-6, "lossOut");
        expect_close(call.softmax.values(), {3.297443, 2.0, 0.606531, 1.0}, 1e-6, "softMaxOutOptional");
    }};

const Case fused_linear_cross_entropy_loss_grad{
    "examples/fused_linear_cross_entropy_loss_grad", [] {
        constexpr std::int64_t n = 1024;
        LossGrad call;
        call.grad = floats({n});
        call.input = {ACL_BF16, {n, n}};
        call.weight = {ACL_BF16, {n, n}};
        call.mask = {ACL_UINT8, {n}};
        call.masked_target = {ACL_INT32, {n}};
        call.softmax = floats({n, n});
        call.input_grad = {ACL_BF16, {n, n}, {1}};
        call.weight_grad = {ACL_BF16, {n, n}, {1}};
        run(call);
        expect_close(call.input_grad.values(), std::vector<double>(n * n), 0, "inputGradOut");
        expect_close(call.weight_grad.values(), std::vector<double>(n * n), 0, "weightGradOut");
    }};

void expect_example_of_adam(const EmaAdam& call, const std::vector<double>& var, const std::vector<double>& s) {
    expect_close(call.var.values(), var, 1e-6, "varRef");
    expect_close(call.m.values(), counting(8), 1e-6, "mRef");
    expect_close(call.v.values(), {1, 2.002, 3.006, 4.012, 5.02, 6.03, 7.042, 8.056}, 1e-6, "vRef");
    expect_close(call.s.values(), s, 1e-6, "sRef");
}

const Case apply_fused_ema_adam{
    "examples/apply_fused_ema_adam", [] {
        // The example fills the integers of step with four floats of 10.0.
        EmaAdam call;
        call.step = {ACL_INT64, {2, 2}, {4692750812812673024.0}};
        run(call);
        expect_example_of_adam(call, {0.9985, 1.997586, 2.99677, 3.996003, 4.995268, 5.994556, 6.993862, 7.993181},
                               {0.99925, 1.998793, 2.998385, 3.998002, 4.997634, 5.997278, 6.996931, 7.996591});
    }};

const Case apply_fused_ema_adam_at_step_10{
    "examples/apply_fused_ema_adam_at_step_10", [] {
        EmaAdam call;
        run(call);
        expect_example_of_adam(call, {0.999347, 1.998783, 2.998235, 3.997694, 4.997158, 5.996626, 6.996096, 7.995568},
                               {0.999673, 1.999392, 2.999117, 3.998847, 4.998579, 5.998313, 6.998048, 7.997784});
    }};

const Case inplace_copy{"examples/inplace_copy", [] {
                            InplaceCopy call;
                            run(call);
                            expect_close(call.self.values(), counting(6), 0, "selfRef");
                        }};

}  // namespace
