// Failures at which a device would hang: ranks disagree, fail, leave, die or never come. All ranks report the same.
#include <cstring>

#include "tests/ranks.h"

namespace {

using namespace test;

constexpr auto kFloat = HCCL_DATA_TYPE_FP32;
constexpr auto kHalf = HCCL_DATA_TYPE_FP16;

using Call = std::function<HcclResult(void* buffer, HcclComm comm, aclrtStream stream)>;

Call all_reduce(std::uint64_t count) {
    return [=](void* buffer, HcclComm comm, aclrtStream stream) {
        return HcclAllReduce(buffer, buffer, count, kFloat, HCCL_REDUCE_SUM, comm, stream);
    };
}

Call send(std::uint64_t count) {
    return [=](void* buffer, HcclComm comm, aclrtStream stream) {
        return HcclSend(buffer, count, kFloat, 1, comm, stream);
    };
}

Call receive(std::uint64_t count, HcclDataType dtype = kFloat) {
    return [=](void* buffer, HcclComm comm, aclrtStream stream) {
        return HcclRecv(buffer, count, dtype, 0, comm, stream);
    };
}

struct Row {
    Call of_rank_0;
    Call of_rank_1;
    // The message on every rank.
    const char* text;
};

CASE("collective_failures/calls_that_differ") {
    const Row table[] = {
        {all_reduce(8), all_reduce(0), "rank 1 called AllReduce(count=0, fp32, sum) where"},
        {send(8), receive(8, kHalf), "rank 1 called Recv(count=8, fp16, from rank 0) where"},
    };
    for (const auto& row : table) {
        const Ranks ranks(2);
        const Buffers data(kFloat, 2, 8);
        // The first calls match.
        ranks.each([&](auto rank) { return all_reduce(2)(data[rank], ranks.comm(rank), ranks.stream(rank)); });
        ranks.each([&](auto rank) {
            return (rank == 0 ? row.of_rank_0 : row.of_rank_1)(data[rank], ranks.comm(rank), ranks.stream(rank));
        });
        for (const std::uint32_t rank : {0, 1}) {
            const auto message = ranks.failure_of(rank);
            expect_contains(message, row.text);
            HcclResult error = HCCL_SUCCESS;
            expect_equal(HcclGetCommAsyncError(ranks.comm(rank), &error), HCCL_SUCCESS, "the status");
            expect_equal(error, HCCL_E_REMOTE, "the asynchronous error");
            expect_contains(recent_error().value_or("no message"), row.text);
            // The communicator has ended.
            expect_equal(all_reduce(2)(data[rank], ranks.comm(rank), ranks.stream(rank)), HCCL_E_REMOTE,
                         "the status of a later call");
            expect_contains(recent_error().value_or("no message"), row.text);
        }
    }
}

CASE("collective_failures/both_ranks_send_first") {
    const Ranks ranks(2, limited_to(1));
    const Buffers data(kFloat, 2, 8);
    ranks.each([&](auto rank) {
        HcclSend(data[rank], 8, kFloat, 1 - rank, ranks.comm(rank), ranks.stream(rank));
        return HcclRecv(data[rank], 8, kFloat, 1 - rank, ranks.comm(rank), ranks.stream(rank));
    });
    for (const std::uint32_t rank : {0, 1}) {
        const auto message = ranks.failure_of(rank);
        expect_contains(message, "did not come within 1 s");
        expect_contains(message, "was last in call 1, Send(count=8, fp32, to rank ");
    }
}

CASE("collective_failures/destroying_ends_the_wait") {
    Ranks ranks(2);
    const Buffers data(kFloat, 2, 8);
    all_reduce(8)(data[0], ranks.comm(0), ranks.stream(0));
    ranks.destroy(0);
    expect_contains(ranks.failure_of(0), "was destroyed");
    expect(all_reduce(8)(data[1], ranks.comm(1), ranks.stream(1)) != 0 || !ranks.failure_of(1).empty(),
           "the other rank was not told");
    recent_error();
}

CASE("collective_failures/memory_that_is_too_small") {
    const Ranks ranks(2);
    const Memory small(4), enough(4096);
    // In this order: once rank 0 has failed, a call of rank 1 would be refused immediately.
    all_reduce(1000)(enough.address(), ranks.comm(1), ranks.stream(1));
    all_reduce(1000)(small.address(), ranks.comm(0), ranks.stream(0));
    for (const std::uint32_t rank : {0, 1}) {
        const auto message = ranks.failure_of(rank);
        expect_contains(message, "device memory at ");
    }
    HcclResult error = HCCL_SUCCESS;
    HcclGetCommAsyncError(ranks.comm(1), &error);
    expect_contains(recent_error().value_or("no message"),
                    "rank 0 failed in call 1, AllReduce(count=1000, fp32, sum),");
}

CASE("collective_failures/a_stream_that_drops_a_call") {
    const Ranks ranks(2);
    const Buffers data(kFloat, 2, 8);
    aclrtSetStreamFailureMode(ranks.stream(1), ACL_STOP_ON_FAILURE);
    const Memory small(4);
    // A copy that exceeds its memory fails, and the stream drops all later work.
    HcclComm alone = nullptr;
    HcclRootInfo root_info;
    HcclGetRootInfo(&root_info);
    HcclCommInitRootInfo(1, &root_info, 0, &alone);
    all_reduce(1000)(small.address(), alone, ranks.stream(1));
    ranks.each([&](auto rank) { return all_reduce(8)(data[rank], ranks.comm(rank), ranks.stream(rank)); });
    expect_contains(ranks.failure_of(0), "rank 1 failed in call 1, AllReduce(count=8, fp32, sum), of communicator ");
    ranks.failure_of(1);
    HcclCommDestroy(alone);
}

CASE("collective_failures/a_call_that_no_stream_takes_is_not_made") {
    const Ranks ranks(2);
    const Buffers data(kFloat, {{1}, {2}});
    int no_stream = 0;
    for (const auto& call : {all_reduce(1), send(1)}) {
        expect_equal(call(data[0], ranks.comm(0), &no_stream), HCCL_E_RUNTIME, "the status");
        recent_error();
    }
    ranks.each([&](auto rank) { return all_reduce(1)(data[rank], ranks.comm(rank), ranks.stream(rank)); });
    send(1)(data[0], ranks.comm(0), ranks.stream(0));
    receive(1)(data[1], ranks.comm(1), ranks.stream(1));
    ranks.wait();
    data.expect_all({3}, "the sums");
}

}  // namespace
