// The three operators of linear cross entropy; tests/phase_one tests refusals.
#include "tests/calls.h"

namespace {

using namespace test;

// An undefined aclFormat has two values.
CASE("fused_linear_online_max_sum/formats_-1_and_255_are_the_same") {
    const auto with = [](int format) {
        return [=](OnlineMaxSum& call) {
            call.target = {ACL_INT32, {3}, {0}, {.format = ACL_FORMAT_UNDEFINED}};
            const View view{.format = static_cast<aclFormat>(format)};
            for (auto* tensor : {&call.max, &call.sum, &call.predicted}) {
                *tensor = {ACL_FLOAT, {3}, {0}, view};
            }
            call.mask = {ACL_UINT8, {1}, {0}, view};
            call.masked_target = {ACL_INT32, {3}, {0}, view};
        };
    };
    check_rows<OnlineMaxSum>(
        {{"the target's", with(ACL_FORMAT_UNDEFINED)}, {"255", with(255)}, {"another", with(ACL_FORMAT_ND), 561103}});
}

// Phase one of these two ignores failures of the launch.
template <class Call>
void fails_in_phase_two(Call& call, aclnnStatus status) {
    const auto phase = phase_one(call);
    expect_equal(phase.status, 0, "phase one's status");
    const Memory workspace(phase.workspace_size);
    expect_equal(call.phase_two(workspace.address(), phase.workspace_size, phase.executor, nullptr), status,
                 "phase two's status");
    expect(recent_error().has_value(), "no message");
}

CASE("fused_linear_online_max_sum/no_kernel", {"Ascend910", "Ascend310P", "Ascend950"}) {
    OnlineMaxSum call;
    fails_in_phase_two(call, 561003);
}

CASE("fused_cross_entropy_loss_with_max_sum/no_kernel", {"Ascend910", "Ascend310P"}) {
    LossWithMaxSum call;
    fails_in_phase_two(call, 561003);
}

CASE("fused_cross_entropy_loss_with_max_sum/no_rows") {
    LossWithMaxSum call;
    for (auto* tensor : {&call.max, &call.sum, &call.predicted, &call.loss}) {
        *tensor = floats({0});
    }
    call.logits = {};
    call.softmax = {};
    fails_in_phase_two(call, 561002);
}

template <bool fails>
void no_rows_but_logits() {
    LossWithMaxSum call;
    for (auto* tensor : {&call.max, &call.sum, &call.predicted, &call.loss}) *tensor = floats({0});
    call.logits = floats({0, 4});
    call.softmax = floats({0, 4});
    fails ? fails_in_phase_two(call, 561002) : run(call);
}

CASE("fused_cross_entropy_loss_with_max_sum/no_rows_but_logits", {"Ascend910B", "Ascend910_93"}) {
    no_rows_but_logits<false>();
}
CASE("fused_cross_entropy_loss_with_max_sum/no_rows_but_logits_on_950", {"Ascend950"}) { no_rows_but_logits<true>(); }

void give_logits_of(LossWithMaxSum& call, const Shape& shape) {
    call.max = floats({3}, {0.5});
    call.sum = floats({3}, {2});
    call.predicted = floats({3}, {0.25});
    call.loss = floats({3}, {7});
    call.logits = floats(shape, {1});
    call.softmax = floats(shape);
}

CASE("fused_cross_entropy_loss_with_max_sum/as_many_losses_as_logits", {"Ascend910B", "Ascend910_93"}) {
    LossWithMaxSum call;
    give_logits_of(call, {2, 2});
    run(call);
    const double loss = std::log(2.0) - 0.25;
    expect_close(call.loss.values(), {loss, loss, 7}, 1e-6, "loss");
}

CASE("fused_cross_entropy_loss_with_max_sum/logits_that_do_not_fit_on_950", {"Ascend950"}) {
    for (const Shape& shape : {Shape{3, 0}, Shape{2, 2}, Shape{4, 2}}) {
        LossWithMaxSum call;
        give_logits_of(call, shape);
        fails_in_phase_two(call, 561002);
    }
}

}  // namespace
