// Phase one's cache: which calls share an entry, and what a hit skips.
#include "tests/calls.h"
#include "tests/executors.h"

namespace {

using namespace test;

CASE("cache/hit_uses_the_addresses_of_its_phase_one") {
    in_new_thread([] {
        MseLossBackward first;
        run(first);
        MseLossBackward second;
        second.target.set({0, 0, 0, 0});
        const auto hit = phase_one(second);
        expect_equal(magic(hit.executor), kCacheWrapper, "the magic");
        // A cached call does not need the tensor objects any more.
        second.self.destroy_handle();
        expect_equal(launch(second, hit), 0, "the synchronisation's status");
        expect_close(second.out.values(), {0, 0.5, 2, 4.5}, 0, "out");
        expect_close(first.out.values(), {0, 0, 1, 3}, 0, "the first out");
    });
}

CASE("cache/what_the_cache_tells_apart") {
    in_new_thread([] {
        const auto kind = [](const std::function<void(MseLossBackward&)>& change) {
            MseLossBackward call;
            change(call);
            const auto phase = phase_one(call);
            expect_equal(phase.status, 0, "the status");
            const auto result = magic(phase.executor);
            expect_equal(launch(call, phase), 0, "the synchronisation's status");
            return result;
        };
        const auto nothing = [](MseLossBackward&) {};
        expect_equal(kind(nothing), kComposed, "the first call");
        expect_equal(kind(nothing), kCacheWrapper, "the same");
        const auto reduction = [](auto& call) { call.reduction = 2; };
        expect_equal(kind(reduction), kComposed, "another reduction");
        const auto strides = [](auto& call) { call.out = {ACL_FLOAT, {2, 2}, {0}, {.strides = Shape{1, 2}}}; };
        expect_equal(kind(strides), kComposed, "other strides");
        const auto storage = [](auto& call) { call.out = {ACL_FLOAT, {2, 2}, {0}, {.storage = Shape{5}}}; };
        expect_equal(kind(storage), kComposed, "another storage");
        const auto offset = [](auto& call) { call.out = {ACL_FLOAT, {2, 2}, {0}, {.offset = 1, .storage = Shape{5}}}; };
        expect_equal(kind(offset), kComposed, "another offset");
        const auto format = [](auto& call) { call.out = {ACL_FLOAT, {2, 2}, {0}, {.format = ACL_FORMAT_NCHW}}; };
        expect_equal(kind(format), kComposed, "another format");
        const auto dtype = [](auto& call) { call.out = {ACL_FLOAT16, {2, 2}}; };
        expect_equal(kind(dtype), kComposed, "another dtype");
        const auto shape = [](auto& call) { call.target = floats({2, 1}); };
        expect_equal(kind(shape), kComposed, "another shape");
    });
}

CASE("cache/one_object_twice_is_another_call") {
    in_new_thread([] {
        MseLossBackward call;
        const auto kind = [&](const aclTensor* self, const aclTensor* target) {
            Phase phase;
            aclnnMseLossBackwardGetWorkspaceSize(call.grad, self, target, 0, call.out, &phase.workspace_size,
                                                 &phase.executor);
            const auto result = magic(phase.executor);
            expect_equal(launch(call, phase), 0, "the synchronisation's status");
            return result;
        };
        expect_equal(kind(call.self, call.target), kComposed, "two objects");
        expect_equal(kind(call.self, call.self), kComposed, "one object twice");
    });
}

CASE("cache/determinism_is_part_of_the_key") {
    in_new_thread([] {
        EmbeddingDenseBackward call;
        const auto kind = [&] {
            const auto phase = phase_one(call);
            const auto result = magic(phase.executor);
            expect_equal(launch(call, phase), 0, "the synchronisation's status");
            return result;
        };
        expect_equal(kind(), kComposed, "the first call");
        expect_equal(aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, 1), 0, "the option's status");
        const auto deterministic = kind();
        aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, 0);
        expect_equal(deterministic, kComposed, "the deterministic call");
        expect_equal(kind(), kCacheWrapper, "the call without it again");
    });
}

// Runs phase one, destroys its executor and returns the executor's kind.
template <class Call>
std::uint64_t kind_of_next(Call& call) {
    const auto phase = phase_one(call);
    const auto result = magic(phase.executor);
    aclDestroyAclOpExecutor(phase.executor);
    return result;
}

CASE("cache/an_entry_is_usable_after_phase_two") {
    in_new_thread([] {
        MseLossBackward call;
        const auto first = phase_one(call);
        const auto second = phase_one(call);
        expect_equal(magic(second.executor), kComposed, "before phase two");
        expect_equal(launch(call, second), 0, "the second's synchronisation");
        expect_equal(kind_of_next(call), kComposed, "after another one's phase two");
        expect_equal(launch(call, first), 0, "the first's synchronisation");
        expect_equal(kind_of_next(call), kCacheWrapper, "after its own phase two");
    });
}

// The entry keeps the key, and can never become usable.
CASE("cache/an_executor_that_never_ran_leaves_no_entry") {
    in_new_thread([] {
        MseLossBackward unused;
        kind_of_next(unused);
        run(unused);
        expect_equal(kind_of_next(unused), kComposed, "after an unused executor");
    });
    in_new_thread([] {
        StridedMseLossBackward failing;
        failing.out = {ACL_FLOAT16, {2, 2}};
        const auto phase = phase_one(failing);
        expect(phase.workspace_size > 0, "the call needs no workspace");
        const auto status = failing.phase_two(nullptr, phase.workspace_size, phase.executor, nullptr);
        expect_equal(status, 161001, "phase two's status");
        recent_error();
        run(failing);
        expect_equal(kind_of_next(failing), kComposed, "after a failed phase two");
    });
    in_new_thread([] {
        MseLossBackward empty;
        for (auto* tensor : {&empty.grad, &empty.self, &empty.target, &empty.out}) {
            *tensor = floats({0});
        }
        run(empty);
        expect_equal(kind_of_next(empty), kComposed, "after an empty call");
    });
}

// torch_npu runs phase two on its own thread.
CASE("cache/phase_two_may_run_in_another_thread") {
    in_new_thread([] {
        MseLossBackward call;
        const auto phase = phase_one(call);
        in_new_thread([&] { expect_equal(launch(call, phase), 0, "the synchronisation"); });
        expect_equal(kind_of_next(call), kCacheWrapper, "the next call");
        in_new_thread([&] { expect_equal(kind_of_next(call), kComposed, "another thread"); });
    });
}

// Only the address is new, so phase one does not notice that the output's memory is too small.
CASE("cache/hit_skips_validation") {
    in_new_thread([] {
        MseLossBackward call;
        run(call);
        aclSetRawTensorAddr(call.out, nullptr);
        const auto hit = phase_one(call);
        expect_equal(hit.status, 0, "the status of the hit");
        expect(launch(call, hit) != 0, "the kernel wrote to a null pointer");
        recent_error();
    });
}

CASE("cache/off", {"cache off"}) {
    expect(!cache_is_on(), "the environment does not turn the cache off");
    MseLossBackward call;
    for (int time = 0; time < 3; ++time) {
        const auto phase = phase_one(call);
        expect_equal(magic(phase.executor), kComposed, "the magic");
        expect_equal(aclSetAclOpExecutorRepeatable(phase.executor), 0, "the status of repeatable");
        expect_equal(aclDestroyAclOpExecutor(phase.executor), 0, "the status of destroying it");
    }
}

}  // namespace
