// The documents' examples, which print these numbers.
#include "tests/calls.h"

namespace {

using namespace test;

template <class Call>
Call done(Call call = {}) {
    run(call);
    return call;
}

CASE("examples/on_every_chip", kAllSocs) {
    expect_close(done<MseLoss>().out.values(), {1.5}, 0, "MseLoss");
    expect_close(done<MseLossBackward>().out.values(), {0, 0, 1, 3}, 0, "MseLossBackward");
    expect_close(done<BinaryCrossEntropy>().out.values(), std::vector<double>(4, 0.780324), 1e-6, "its loss");
    const std::vector<double> gradients(4, -0.095238);
    expect_close(done<BinaryCrossEntropyBackward>().out.values(), gradients, 1e-6, "its gradients");
    expect_close(done<Embedding>().out.values(), counting(12, 4), 0, "Embedding");
    expect_close(done<InplaceCopy>().self.values(), counting(6), 0, "InplaceCopy");
    if (configuration() == "Ascend310P") return;
    const std::vector<double> rows{0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0};
    expect_close(done<EmbeddingDenseBackward>().out.values(), rows, 0, "EmbeddingDenseBackward");
}

CASE("examples/linear_cross_entropy") {
    const auto first = done<OnlineMaxSum>();
    expect_close(first.max.values(), {4, 4, 4}, 0, "logitsMaxLocalOut");
    expect_close(first.sum.values(), {5, 5, 5}, 0, "sumExpLogitsLocalOut");
    expect_close(first.predicted.values(), {0, 0, 0}, 0, "predictedLogits");
    expect_close(first.mask.values(), {0}, 0, "targetMaskOut");
    expect_close(first.masked_target.values(), {1, 1, 1}, 0, "maskedTargetOut");
    expect_close(first.logits.values(), std::vector<double>(15, 4), 0, "logits");
    const auto second = done<LossWithMaxSum>();
    expect_close(second.loss.values(), {-1.193147, -1.0}, 1e-6, "lossOut");
    expect_close(second.softmax.values(), {3.297443, 2.0, 0.606531, 1.0}, 1e-6, "softMaxOutOptional");
}

void expect_example_of_adam(const EmaAdam& call, const std::vector<double>& var, const std::vector<double>& s) {
    expect_close(call.var.values(), var, 1e-6, "varRef");
    expect_close(call.m.values(), counting(8), 1e-6, "mRef");
    expect_close(call.v.values(), {1, 2.002, 3.006, 4.012, 5.02, 6.03, 7.042, 8.056}, 1e-6, "vRef");
    expect_close(call.s.values(), s, 1e-6, "sRef");
}

CASE("examples/apply_fused_ema_adam") {
    // The example fills the int64 elements of step with four floats of 10.0.
    EmaAdam call;
    call.step = {ACL_INT64, {2, 2}, {4692750812812673024.0}};
    run(call);
    expect_example_of_adam(call, {0.9985, 1.997586, 2.99677, 3.996003, 4.995268, 5.994556, 6.993862, 7.993181},
                           {0.99925, 1.998793, 2.998385, 3.998002, 4.997634, 5.997278, 6.996931, 7.996591});
    expect_example_of_adam(done<EmaAdam>(),
                           {0.999347, 1.998783, 2.998235, 3.997694, 4.997158, 5.996626, 6.996096, 7.995568},
                           {0.999673, 1.999392, 2.999117, 3.998847, 4.998579, 5.998313, 6.998048, 7.997784});
}

}  // namespace
