// The life cycle of executors.
#include "tests/calls.h"
#include "tests/executors.h"

namespace {

using namespace test;

CASE("life_cycle/magics") {
    in_new_thread([] {
        MseLossBackward call;
        const auto miss = phase_one(call);
        expect_equal(magic(miss.executor), kComposed, "the magic after a miss");
        expect_equal(launch(call, miss), 0, "the synchronisation's status");
        const auto hit = phase_one(call);
        expect_equal(magic(hit.executor), kCacheWrapper, "the magic after a hit");
        expect_equal(miss.workspace_size, hit.workspace_size, "the workspace after a hit");
        EmaAdam adam;
        const auto individual = phase_one(adam);
        expect_equal(magic(individual.executor), kIndividual, "the magic of an individual operator");
        for (auto* executor : {hit.executor, individual.executor}) {
            expect_equal(aclDestroyAclOpExecutor(executor), 0, "the status of destroying it");
        }
    });
}

CASE("life_cycle/repeatable") {
    in_new_thread([] {
        MseLossBackward call;
        const auto phase = phase_one(call);
        expect_equal(aclSetAclOpExecutorRepeatable(phase.executor), 0, "the status");
        expect_equal(launch(call, phase), 0, "the first synchronisation");
        expect_close(call.out.values(), {0, 0, 1, 3}, 0, "out");
        call.target.set({0, 0, 0, 0});
        expect_equal(launch(call, phase), 0, "the second synchronisation");
        expect_close(call.out.values(), {0, 0.5, 2, 4.5}, 0, "out with another target");
        // The index is ignored: phase one's tensor identifies the argument.
        const auto other = floats({2, 2}, {9});
        expect_equal(aclSetOutputTensorAddr(phase.executor, 77, call.out, other.address()), 0,
                     "aclSetOutputTensorAddr's status");
        expect_equal(launch(call, phase), 0, "the third synchronisation");
        expect_close(other.values(), {0, 0.5, 2, 4.5}, 0, "the other out");
        // The entry has left the cache, so the same call misses.
        const auto again = phase_one(call);
        expect_equal(magic(again.executor), kComposed, "the magic of the same call");
        expect_equal(aclDestroyAclOpExecutor(again.executor), 0, "destroying the second");
        expect_equal(aclDestroyAclOpExecutor(phase.executor), 0, "destroying it");
    });
}

CASE("life_cycle/refuses_to_be_repeatable") {
    in_new_thread([] {
        MseLossBackward call;
        run(call);
        const auto hit = phase_one(call);
        expect_equal(aclSetAclOpExecutorRepeatable(hit.executor), 561000, "the status of a cache wrapper");
        expect(!recent_error(), "the refusal left a message");
        // The executor still works.
        expect_equal(launch(call, hit), 0, "the synchronisation's status");
        Embedding on_ai_cpu;
        on_ai_cpu.weight = {ACL_DOUBLE, {10, 3}};
        on_ai_cpu.out = {ACL_DOUBLE, {4, 3}};
        const auto phase = phase_one(on_ai_cpu);
        expect_equal(aclSetAclOpExecutorRepeatable(phase.executor), 561000, "the status of work for an AI CPU");
        expect(!recent_error(), "the refusal left a message");
        expect_equal(launch(on_ai_cpu, phase), 0, "the synchronisation's status");
        expect_equal(aclSetAclOpExecutorRepeatable(nullptr), 561103, "the status of null");
        recent_error();
    });
}

CASE("life_cycle/destroying_executors") {
    expect_equal(aclDestroyAclOpExecutor(nullptr), 561103, "the status of null");
    std::uint64_t no_executor[64] = {42};
    expect_equal(aclDestroyAclOpExecutor(reinterpret_cast<aclOpExecutor*>(no_executor)), 561000,
                 "the status of an unknown magic");
    MseLossBackward call;
    const auto phase = phase_one(call);
    launch(call, phase);
    expect_equal(aclDestroyAclOpExecutor(phase.executor), 561000, "the status of a consumed one");
    recent_error();
}

CASE("life_cycle/phase_two_refusals_consume_the_executor") {
    StridedMseLossBackward call;
    expect_equal(call.phase_two(nullptr, 0, nullptr, nullptr), 161001, "the status without executor");
    const auto phase = phase_one(call);
    expect(phase.workspace_size > 0, "there is no workspace");
    expect_equal(call.phase_two(nullptr, phase.workspace_size, phase.executor, nullptr), 161001,
                 "the status without workspace");
    expect_equal(aclDestroyAclOpExecutor(phase.executor), 561000, "the status of destroying it");
    expect(recent_error().has_value(), "no message");
    run(call);
}

CASE("life_cycle/phase_two_without_executor_says_why_phase_one_failed") {
    MseLossBackward call;
    call.reduction = 7;
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    expect(call.phase_one(&size, &executor) != 0, "phase one accepts a reduction of 7");
    recent_error();
    expect_equal(call.phase_two(nullptr, 0, executor, nullptr), 161001, "the status without executor");
    const auto message = recent_error().value_or("");
    for (const auto* part : {"; aclnnMseLossBackwardGetWorkspaceSize failed last with: ", "reduction"}) {
        expect(message.find(part) != std::string::npos, message);
    }
}

CASE("life_cycle/phase_one_refuses_destroyed_tensors") {
    MseLossBackward call;
    aclTensor* const self = call.self;
    call.self.destroy_handle();
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    expect_equal(
        aclnnMseLossBackwardGetWorkspaceSize(call.grad, self, call.target, call.reduction, call.out, &size, &executor),
        561000, "phase one's status");
    expect(recent_error()->find("destroyed before") != std::string::npos, "another message");
}

CASE("life_cycle/small_workspace_is_a_device_fault") {
    StridedMseLossBackward call;
    const auto phase = phase_one(call);
    const Memory workspace(phase.workspace_size);
    const Stream stream;
    expect_equal(call.phase_two(workspace.address(), phase.workspace_size / 2, phase.executor, stream.handle), 0,
                 "phase two does not look at the size, its status");
    expect(stream.wait() != 0, "the kernel wrote beyond the workspace");
    recent_error();
}

CASE("life_cycle/tensors_outlive_phase_one") {
    in_new_thread([] {
        StridedMseLossBackward call;
        const auto phase = phase_one(call);
        call.self.destroy_handle();
        const Memory workspace(phase.workspace_size);
        expect_equal(call.phase_two(workspace.address(), phase.workspace_size, phase.executor, nullptr), 561000,
                     "phase two's status");
        expect(recent_error().has_value(), "no message");
    });
}

CASE("life_cycle/messages_are_read_once") {
    expect(!recent_error(), "there is a message to begin with");
    MseLossBackward call;
    call.reduction = 5;
    phase_one(call);
    // Messages are per thread.
    in_new_thread([] { expect(!recent_error(), "another thread has the message"); });
    const auto message = recent_error().value_or("");
    expect(message.find("EZ1001") != std::string::npos, "no EZ1001 in: ", message);
    expect(message.find("aclnnMseLossBackward") != std::string::npos, "no name in: ", message);
    expect(!recent_error(), "the message was not forgotten");
}

}  // namespace
