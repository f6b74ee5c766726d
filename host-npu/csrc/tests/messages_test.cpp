// Messages from rank to rank.
#include "tests/ranks.h"

namespace {

using namespace test;

constexpr auto kFloat = HCCL_DATA_TYPE_FP32;
// More than is on its way at a time.
constexpr std::size_t kMany = 300'001;

const Case messages{
    "messages/arrive_in_order", [] {
        const Ranks ranks(2);
        const Buffers from(kFloat, {{1, 2}, {3, 4}}), to(kFloat, 2, 2);
        for (const std::uint32_t which : {0, 1}) {
            expect_equal(HcclSend(from[which], 2, kFloat, 1, ranks.comm(0), ranks.stream(0)), 0, "send");
            expect_equal(HcclRecv(to[which], 2, kFloat, 0, ranks.comm(1), ranks.stream(1)), 0, "receive");
        }
        ranks.wait();
        to.expect_rank(0, {1, 2}, "the first message");
        to.expect_rank(1, {3, 4}, "the second message");
    }};

const Case rendezvous{"messages/a_send_waits_for_its_receive", [] {
                          const Ranks ranks(2);
                          const Buffers data(kFloat, {{7}, {0}});
                          expect_equal(HcclSend(data[0], 1, kFloat, 1, ranks.comm(0), ranks.stream(0)), 0, "send");
                          expect_equal(aclrtSynchronizeStreamWithTimeout(ranks.stream(0), 30), 507046,
                                       "the status before the receive");
                          recent_error();
                          expect_equal(HcclRecv(data[1], 1, kFloat, 0, ranks.comm(1), ranks.stream(1)), 0, "receive");
                          ranks.wait();
                          data.expect_all({7}, "the message");
                      }};

const Case batch{"messages/of_a_batch_go_on_at_the_same_time", [] {
                     const Ranks ranks(3);
                     const Buffers from(kFloat, {std::vector<double>(kMany, 1), std::vector<double>(kMany, 2),
                                                 std::vector<double>(kMany, 3)});
                     const Buffers to(kFloat, 3, kMany);
                     // A ring, in which everybody sends first.
                     ranks.each([&](auto rank) {
                         HcclSendRecvItem items[] = {{HCCL_SEND, from[rank], kMany, kFloat, (rank + 1) % 3},
                                                     {HCCL_RECV, to[rank], kMany, kFloat, (rank + 2) % 3}};
                         return HcclBatchSendRecv(items, 2, ranks.comm(rank), ranks.stream(rank));
                     });
                     ranks.wait();
                     for (const std::uint32_t rank : {0, 1, 2}) {
                         to.expect_rank(rank, std::vector<double>(kMany, (rank + 2) % 3 + 1), "the message");
                     }
                 }};

const Case group{"messages/of_a_group_go_on_at_the_same_time", [] {
                     const Ranks ranks(2);
                     const Buffers from(kFloat, {{1}, {2}}), to(kFloat, 2, 1);
                     ranks.each([&](auto rank) {
                         const auto other = 1 - rank;
                         HcclGroupStart();
                         HcclSend(from[rank], 1, kFloat, other, ranks.comm(rank), ranks.stream(rank));
                         HcclRecv(to[rank], 1, kFloat, other, ranks.comm(rank), ranks.stream(rank));
                         return HcclGroupEnd();
                     });
                     ranks.wait();
                     to.expect_rank(0, {2}, "the message");
                     to.expect_rank(1, {1}, "the message");
                     expect_equal(HcclGroupEnd(), HCCL_E_NOT_SUPPORT, "the status of an end without a start");
                     recent_error();
                 }};

const Case to_itself{"messages/to_oneself_are_for_batches_and_groups", [] {
                         const Ranks ranks(1);
                         const Buffers data(kFloat, {{5}, {0}});
                         HcclSendRecvItem items[] = {{HCCL_SEND, data[0], 1, kFloat, 0},
                                                     {HCCL_RECV, data[1], 1, kFloat, 0}};
                         expect_equal(HcclBatchSendRecv(items, 2, ranks.comm(0), ranks.stream(0)), 0, "the status");
                         ranks.wait();
                         data.expect_all({5}, "the message");
                         expect_equal(HcclSend(data[0], 1, kFloat, 0, ranks.comm(0), ranks.stream(0)), HCCL_E_PARA,
                                      "the status of a send");
                         recent_error();
                         const Buffers other(kFloat, {{7}, {0}});
                         HcclGroupStart();
                         expect_equal(HcclRecv(other[1], 1, kFloat, 0, ranks.comm(0), ranks.stream(0)), 0, "a receive");
                         expect_equal(HcclSend(other[0], 1, kFloat, 0, ranks.comm(0), ranks.stream(0)), 0, "a send");
                         expect_equal(HcclGroupEnd(), 0, "the status of the group");
                         ranks.wait();
                         other.expect_all({7}, "the message of the group");
                     }};

const Case streams{"messages/on_two_streams_overlap", [] {
                       const Ranks ranks(2);
                       const Stream others[2];
                       const Buffers from(kFloat, {{1}, {2}}), to(kFloat, 2, 1);
                       // Both send on one stream and receive on another, which would wait for ever on one.
                       ranks.each([&](auto rank) {
                           return HcclSend(from[rank], 1, kFloat, 1 - rank, ranks.comm(rank), ranks.stream(rank));
                       });
                       ranks.each([&](auto rank) {
                           return HcclRecv(to[rank], 1, kFloat, 1 - rank, ranks.comm(rank), others[rank].handle);
                       });
                       ranks.wait();
                       for (const auto& other : others) expect_equal(other.wait(), 0, "the other stream's status");
                       to.expect_rank(0, {2}, "the message");
                   }};

}  // namespace
