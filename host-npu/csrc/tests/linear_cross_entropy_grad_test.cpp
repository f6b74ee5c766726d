// What aclnnFusedLinearCrossEntropyLossGrad does in its two modes; tests/phase_one has what it refuses.
#include "tests/calls.h"

namespace {

using namespace test;

// A missing softmax comes before any other missing argument, the types before labelSmoothing, that before the shapes.
const Case order{"fused_linear_cross_entropy_loss_grad/order_of_checks", [] {
                     LossGrad call;
                     call.softmax = {};
                     call.grad = {};
                     phase_one(call);
                     const auto missing = recent_error().value_or("");
                     expect(missing.find("softmax") != std::string::npos, "not the softmax: ", missing);
                     LossGrad both;
                     both.label_smoothing = 1;
                     both.input = {ACL_BF16, {4, 4}};
                     phase_one(both);
                     const auto smoothing = recent_error().value_or("");
                     expect(smoothing.find("labelSmoothing") != std::string::npos, "not labelSmoothing: ", smoothing);
                 }};

template <class Call>
void empty() {
    Call call;
    call.grad = floats({0});
    call.input = {ACL_BF16, {0, 4}};
    call.mask = {ACL_BOOL, {0}};
    call.masked_target = {ACL_INT32, {0}};
    if (call.softmax != nullptr) {
        call.softmax = floats({0, 130});
    } else {
        call.max = floats({0});
        call.sum = floats({0});
    }
    call.input_grad = {ACL_BF16, {0, 4}};
    call.weight_grad = {ACL_BF16, {130, 4}, {7}};
    const auto phase = phase_one(call);
    expect_equal(phase.status, 0, "the status");
    expect_equal(phase.workspace_size, 0u, "workspaceSize");
    expect_equal(launch(call, phase), 0, "the synchronisation's status");
    expect_close(call.weight_grad.values(), std::vector<double>(520, 7), 0, "weightGradOut");
}

const Case empty_with_softmax{"fused_linear_cross_entropy_loss_grad/empty_leaves_outputs_untouched", empty<LossGrad>,
                              kAllSocs};
const Case empty_without_softmax{"fused_linear_cross_entropy_loss_grad/empty_without_softmax",
                                 empty<LossGradFromStatistics>, kAllSocs};

const Case other_chips{"fused_linear_cross_entropy_loss_grad/unsupported_chip",
                       [] {
                           LossGrad call;
                           expect_equal(phase_one(call).status, 361001, "the status");
                           expect(recent_error().value_or("").find("EZ9903") != std::string::npos, "no EZ9903");
                           // Bad arguments are found before the chip.
                           LossGrad bad;
                           bad.label_smoothing = 1;
                           expect_equal(phase_one(bad).status, 161002, "the status of a bad argument");
                           recent_error();
                       },
                       {"Ascend910", "Ascend310P", "Ascend950"}};

// Outside the softmax it is a fault; without one no tile has the target.
const Case stray_targets{"fused_linear_cross_entropy_loss_grad/stray_targets", [] {
                             LossGrad call;
                             call.masked_target.set({0, -100, 1});
                             expect(launch(call, phase_one(call)) != 0, "target -100 went unnoticed");
                             recent_error();
                             LossGradFromStatistics other;
                             other.masked_target.set({0, -100, 130});
                             run(other);
                         }};

}  // namespace
