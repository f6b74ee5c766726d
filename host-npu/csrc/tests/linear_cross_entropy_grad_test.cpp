// The two modes of aclnnFusedLinearCrossEntropyLossGrad; tests/phase_one tests refusals.
#include "tests/calls.h"

namespace {

using namespace test;

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

CASE("fused_linear_cross_entropy_loss_grad/empty_leaves_outputs_untouched", kAllSocs) { empty<LossGrad>(); }
CASE("fused_linear_cross_entropy_loss_grad/empty_without_softmax", kAllSocs) { empty<LossGradFromStatistics>(); }

CASE("fused_linear_cross_entropy_loss_grad/unsupported_chip", {"Ascend910", "Ascend310P", "Ascend950"}) {
    LossGrad call;
    expect_equal(phase_one(call).status, 361001, "the status");
    expect(recent_error().value_or("").find("EZ9903") != std::string::npos, "no EZ9903");
    // Invalid arguments are reported before the chip.
    LossGrad bad;
    bad.label_smoothing = 1;
    expect_equal(phase_one(bad).status, 161002, "the status of a bad argument");
    recent_error();
}

}  // namespace
