// aclnnApplyFusedEmaAdam, whose generated phase one differs from the other operators'.
#include "tests/calls.h"

namespace {

using namespace test;

// A null workspaceSize is treated as a hit of the argument cache.
CASE("apply_fused_ema_adam/phase_two_refuses_what_no_workspace_size_was_asked_for") {
    EmaAdam call;
    aclOpExecutor* executor = nullptr;
    expect_equal(call.phase_one(nullptr, &executor), 0, "the status without workspaceSize");
    expect(executor != nullptr, "there is no executor");
    expect(call.phase_two(nullptr, 0, executor, nullptr) != 0, "phase two accepted it");
    recent_error();
    expect_equal(aclDestroyAclOpExecutor(executor), 0, "aclDestroyAclOpExecutor's status");
}

CASE("apply_fused_ema_adam/refused_phase_two_keeps_the_executor") {
    EmaAdam call;
    const auto phase = phase_one(call);
    expect_equal(phase.status, 0, "phase one's status");
    expect(phase.workspace_size >= 16u << 20, "workspaceSize is ", phase.workspace_size);
    const Memory workspace(phase.workspace_size);
    expect_equal(call.phase_two(nullptr, phase.workspace_size, phase.executor, nullptr), 161001,
                 "the status without workspace");
    expect_equal(call.phase_two(workspace.address(), phase.workspace_size - 1, phase.executor, nullptr), 161002,
                 "the status of a small workspace");
    expect_equal(call.phase_two(workspace.address(), phase.workspace_size, nullptr, nullptr), 161001,
                 "the status without executor");
    recent_error();
    expect_equal(launch(call, phase), 0, "the synchronisation's status");
    expect(call.var.values() != counting(8), "varRef did not change");
}

CASE("apply_fused_ema_adam/empty_skips_the_launch") {
    EmaAdam call;
    for (auto* tensor : {&call.grad, &call.var, &call.m, &call.v, &call.s}) {
        *tensor = floats({0, 3});
    }
    run(call);
    // All outputs are empty, so the tiling, which compares the shapes, does not run.
    call.grad = floats({8});
    run(call);
}

CASE("apply_fused_ema_adam/index_selects_the_tensor") {
    EmaAdam call;
    const auto phase = phase_one(call);
    expect_equal(aclSetAclOpExecutorRepeatable(phase.executor), 0, "the status of repeatable");
    expect_equal(launch(call, phase), 0, "the first run's synchronisation");
    // Another parameter: varRef is both input 1 and output 0.
    const auto other = floats({2, 2, 2}, {5});
    const auto before = call.var.values();
    expect_equal(aclSetInputTensorAddr(phase.executor, 1, call.var, other.address()), 0,
                 "aclSetInputTensorAddr's status");
    expect_equal(launch(call, phase), 0, "the second run's synchronisation");
    expect_close(call.var.values(), before, 0, "the first varRef");
    expect(other.values() != std::vector<double>(8, 5), "the second varRef did not change");
    expect_equal(aclSetOutputTensorAddr(phase.executor, 0, call.var, call.var.address()), 0,
                 "aclSetOutputTensorAddr's status");
    expect_equal(aclSetTensorAddr(phase.executor, 5, call.step, call.step.address()), 0, "aclSetTensorAddr's status");
    expect_equal(aclSetInputTensorAddr(phase.executor, 6, call.var, nullptr), 161002, "the status of input 6");
    expect_equal(aclSetOutputTensorAddr(phase.executor, 4, call.var, nullptr), 161002, "the status of output 4");
    recent_error();
    expect_equal(aclDestroyAclOpExecutor(phase.executor), 0, "the status of destroying it");
}

}  // namespace
