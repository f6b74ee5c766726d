// Collectives and messages that torch_npu does not call; tests/collectives.py checks the transferred data.
#include <cmath>

#include "tests/ranks.h"

namespace {

using namespace test;

constexpr auto kFloat = HCCL_DATA_TYPE_FP32;
constexpr auto kSum = HCCL_REDUCE_SUM;

CASE("collectives/not_a_number_stays") {
    const Ranks ranks(2);
    for (const auto op : {HCCL_REDUCE_MAX, HCCL_REDUCE_MIN}) {
        const Buffers data(kFloat, {{NAN, 1}, {1, NAN}});
        ranks.each([&](auto rank) {
            return HcclAllReduce(data[rank], data[rank], 2, kFloat, op, ranks.comm(rank), ranks.stream(rank));
        });
        ranks.wait();
        data.expect_all({NAN, NAN}, join("operation ", op));
    }
}

CASE("collectives/broadcast_of_every_type") {
    const Ranks ranks(2);
    for (const auto& type : kHcclTypes) {
        std::vector<std::uint8_t> bytes(5 * type.size);
        for (std::size_t index = 0; index < bytes.size(); ++index) bytes[index] = 3 * index + 1;
        const Memory from(bytes.size()), to(bytes.size());
        from.upload(bytes);
        ranks.each([&](auto rank) {
            return HcclBroadcast(rank == 0 ? from.address() : to.address(), 5, type.hccl, 0, ranks.comm(rank),
                                 ranks.stream(rank));
        });
        ranks.wait();
        expect(to.download() == bytes, "type ", type.hccl, " was not copied");
    }
}

CASE("collectives/the_caller_does_not_wait") {
    const Ranks ranks(2);
    const Buffers data(kFloat, {{1}, {2}});
    const auto call = [&](std::uint32_t rank) {
        expect_equal(HcclAllReduce(data[rank], data[rank], 1, kFloat, kSum, ranks.comm(rank), ranks.stream(rank)),
                     HCCL_SUCCESS, "the status");
    };
    // Rank 0 makes two calls before rank 1 makes one.
    call(0);
    call(0);
    aclrtStreamStatus status{};
    expect_equal(aclrtStreamQuery(ranks.stream(0), &status), 0, "the query's status");
    expect_equal(status, ACL_STREAM_STATUS_NOT_READY, "the stream's status");
    call(1);
    call(1);
    ranks.wait();
    data.expect_all({6}, "the sums");
}

CASE("collectives/what_a_chip_reduces", {"Ascend910", "Ascend910B", "Ascend910_93", "Ascend310P", "Ascend950"}) {
    const Ranks ranks(1);
    const Buffers data(HCCL_DATA_TYPE_FP64, 1, 1);
    const auto status = [&](HcclDataType dtype, HcclReduceOp op) {
        const auto result = HcclAllReduce(data[0], data[0], 1, dtype, op, ranks.comm(0), ranks.stream(0));
        expect_equal(recent_error().has_value(), result != HCCL_SUCCESS, "whether there is a message");
        return result == HCCL_SUCCESS;
    };
    const auto chip = configuration();
    const bool is_older = chip == "Ascend910" || chip == "Ascend310P";
    expect_equal(status(HCCL_DATA_TYPE_FP16, HCCL_REDUCE_PROD), true, "products of fp16");
    expect_equal(status(HCCL_DATA_TYPE_UINT8, kSum), false, "sums of uint8");
    expect_equal(status(HCCL_DATA_TYPE_BFP16, kSum), !is_older, "sums of bfp16");
    expect_equal(status(HCCL_DATA_TYPE_BFP16, HCCL_REDUCE_PROD), false, "products of bfp16");
    expect_equal(status(HCCL_DATA_TYPE_INT16, kSum), chip != "Ascend910", "sums of int16");
    expect_equal(status(HCCL_DATA_TYPE_INT64, kSum), chip != "Ascend310P", "sums of int64");
    expect_equal(status(HCCL_DATA_TYPE_FP64, kSum), chip == "Ascend950", "sums of fp64");
    ranks.wait();
}

CASE("messages/a_send_waits_for_its_receive") {
    const Ranks ranks(2);
    const Buffers data(kFloat, {{7}, {0}});
    expect_equal(HcclSend(data[0], 1, kFloat, 1, ranks.comm(0), ranks.stream(0)), 0, "send");
    expect_equal(aclrtSynchronizeStreamWithTimeout(ranks.stream(0), 30), 507046, "the status before the receive");
    recent_error();
    expect_equal(HcclRecv(data[1], 1, kFloat, 0, ranks.comm(1), ranks.stream(1)), 0, "receive");
    ranks.wait();
    data.expect_all({7}, "the message");
}

CASE("messages/to_oneself_are_for_batches_and_groups") {
    const Ranks ranks(1);
    const Buffers data(kFloat, {{5}, {0}});
    HcclSendRecvItem items[] = {{HCCL_SEND, data[0], 1, kFloat, 0}, {HCCL_RECV, data[1], 1, kFloat, 0}};
    expect_equal(HcclBatchSendRecv(items, 2, ranks.comm(0), ranks.stream(0)), 0, "the status");
    ranks.wait();
    data.expect_all({5}, "the message");
    expect_equal(HcclSend(data[0], 1, kFloat, 0, ranks.comm(0), ranks.stream(0)), HCCL_E_PARA, "the status of a send");
    recent_error();
    const Buffers other(kFloat, {{7}, {0}});
    HcclGroupStart();
    expect_equal(HcclRecv(other[1], 1, kFloat, 0, ranks.comm(0), ranks.stream(0)), 0, "a receive");
    expect_equal(HcclSend(other[0], 1, kFloat, 0, ranks.comm(0), ranks.stream(0)), 0, "a send");
    expect_equal(HcclGroupEnd(), 0, "the status of the group");
    ranks.wait();
    other.expect_all({7}, "the message of the group");
}

CASE("messages/on_two_streams_overlap") {
    const Ranks ranks(2);
    const Stream others[2];
    const Buffers from(kFloat, {{1}, {2}}), to(kFloat, 2, 1);
    // Both ranks send on one stream and receive on another; on the same stream they would wait forever.
    ranks.each(
        [&](auto rank) { return HcclSend(from[rank], 1, kFloat, 1 - rank, ranks.comm(rank), ranks.stream(rank)); });
    ranks.each(
        [&](auto rank) { return HcclRecv(to[rank], 1, kFloat, 1 - rank, ranks.comm(rank), others[rank].handle); });
    ranks.wait();
    for (const auto& other : others) expect_equal(other.wait(), 0, "the other stream's status");
    to.expect_rank(0, {2}, "the message");
}

}  // namespace
