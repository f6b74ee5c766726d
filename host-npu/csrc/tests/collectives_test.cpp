// What collectives compute and move.
#include <algorithm>
#include <cmath>

#include "tests/ranks.h"

namespace {

using namespace test;

constexpr auto kFloat = HCCL_DATA_TYPE_FP32;
constexpr auto kSum = HCCL_REDUCE_SUM;

// More than ranks show one another at a time.
constexpr std::size_t kMany = 700'001;

std::vector<double> counted(std::size_t count, double start) {
    std::vector<double> values(count);
    for (std::size_t index = 0; index < count; ++index) values[index] = start + static_cast<double>(index % 1000);
    return values;
}

const Case operations{
    "collectives/all_reduce_of_every_type", [] {
        const Ranks ranks(3);
        const std::vector<std::vector<double>> values = {{1, -2, 5}, {3, -4, 0}, {2, 7, 1}};
        const std::vector<std::pair<HcclReduceOp, std::vector<double>>> results = {
            {HCCL_REDUCE_SUM, {6, 1, 6}},
            {HCCL_REDUCE_PROD, {6, 56, 0}},
            {HCCL_REDUCE_MAX, {3, 7, 5}},
            {HCCL_REDUCE_MIN, {1, -4, 0}},
        };
        for (const auto dtype : {HCCL_DATA_TYPE_INT8, HCCL_DATA_TYPE_INT16, HCCL_DATA_TYPE_INT32, HCCL_DATA_TYPE_INT64,
                                 HCCL_DATA_TYPE_FP16, HCCL_DATA_TYPE_FP32, HCCL_DATA_TYPE_BFP16}) {
            for (const auto& [op, expected] : results) {
                const bool has_product = dtype != HCCL_DATA_TYPE_INT16 && dtype != HCCL_DATA_TYPE_BFP16;
                if (op == HCCL_REDUCE_PROD && !has_product) continue;
                const Buffers from(dtype, values), to(dtype, 3, 3);
                ranks.each([&, op = op](auto rank) {
                    return HcclAllReduce(from[rank], to[rank], 3, dtype, op, ranks.comm(rank), ranks.stream(rank));
                });
                ranks.wait();
                to.expect_all(expected, join("type ", dtype, ", operation ", op));
            }
        }
    }};

const Case rounding{
    "collectives/16_bit_sums_are_rounded_once", [] {
        const Ranks ranks(3);
        // Rounded after each addition, the sum would stay what it begins with.
        const std::pair<HcclDataType, double> table[] = {{HCCL_DATA_TYPE_FP16, 2048}, {HCCL_DATA_TYPE_BFP16, 256}};
        for (const auto& [dtype, large] : table) {
            const Buffers data(dtype, {{large}, {1}, {1}});
            ranks.each([&, dtype = dtype](auto rank) {
                return HcclAllReduce(data[rank], data[rank], 1, dtype, kSum, ranks.comm(rank), ranks.stream(rank));
            });
            ranks.wait();
            data.expect_all({large + 2}, join("type ", dtype));
        }
    }};

const Case not_a_number{"collectives/not_a_number_stays", [] {
                            const Ranks ranks(2);
                            for (const auto op : {HCCL_REDUCE_MAX, HCCL_REDUCE_MIN}) {
                                const Buffers data(kFloat, {{NAN, 1}, {1, NAN}});
                                ranks.each([&](auto rank) {
                                    return HcclAllReduce(data[rank], data[rank], 2, kFloat, op, ranks.comm(rank),
                                                         ranks.stream(rank));
                                });
                                ranks.wait();
                                data.expect_all({NAN, NAN}, join("operation ", op));
                            }
                        }};

const Case many{"collectives/many_elements_in_place", [] {
                    const Ranks ranks(2);
                    const auto first = counted(kMany, 0), second = counted(kMany, 5);
                    const Buffers data(kFloat, {first, second});
                    ranks.each([&](auto rank) {
                        return HcclAllReduce(data[rank], data[rank], kMany, kFloat, kSum, ranks.comm(rank),
                                             ranks.stream(rank));
                    });
                    ranks.wait();
                    std::vector<double> expected(kMany);
                    for (std::size_t index = 0; index < kMany; ++index) expected[index] = first[index] + second[index];
                    data.expect_all(expected, "the sums");
                }};

const Case every_type{"collectives/broadcast_of_every_type", [] {
                          const Ranks ranks(2);
                          for (const auto& type : kHcclTypes) {
                              std::vector<std::uint8_t> bytes(5 * type.size);
                              for (std::size_t index = 0; index < bytes.size(); ++index) bytes[index] = 3 * index + 1;
                              const Memory from(bytes.size()), to(bytes.size());
                              from.upload(bytes);
                              ranks.each([&](auto rank) {
                                  return HcclBroadcast(rank == 0 ? from.address() : to.address(), 5, type.hccl, 0,
                                                       ranks.comm(rank), ranks.stream(rank));
                              });
                              ranks.wait();
                              expect(to.download() == bytes, "type ", type.hccl, " was not copied");
                          }
                      }};

const Case reduce{"collectives/reduce_writes_on_the_root_alone", [] {
                      const Ranks ranks(3);
                      const Buffers from(kFloat, {{1}, {2}, {4}}), to(kFloat, 3, 1, -1);
                      ranks.each([&](auto rank) {
                          return HcclReduce(from[rank], to[rank], 1, kFloat, kSum, 1, ranks.comm(rank),
                                            ranks.stream(rank));
                      });
                      ranks.wait();
                      to.expect_rank(0, {-1}, "the result");
                      to.expect_rank(1, {7}, "the result");
                      to.expect_rank(2, {-1}, "the result");
                  }};

const Case uneven_gathers{"collectives/all_gather_of_uneven_parts", [] {
                              const Ranks ranks(3);
                              const Buffers from(kFloat, {{1, 2}, {}, {5}}), to(kFloat, 3, 5, -1);
                              const std::uint64_t counts[] = {2, 0, 1}, places[] = {1, 3, 4};
                              ranks.each([&](auto rank) {
                                  return HcclAllGatherV(from[rank], counts[rank], to[rank], counts, places, kFloat,
                                                        ranks.comm(rank), ranks.stream(rank));
                              });
                              ranks.wait();
                              to.expect_all({-1, 1, 2, -1, 5}, "the parts");
                          }};

const Case uneven_exchanges{
    "collectives/all_to_all_of_uneven_parts", [] {
        const Ranks ranks(2);
        // counts[from][to]
        const std::uint64_t counts[2][2] = {{1, 2}, {0, 1}}, sent[2][2] = {{0, 1}, {0, 0}};
        const std::uint64_t received[2][2] = {{1, 0}, {2, 1}}, places[2][2] = {{0, 1}, {1, 0}};
        const Buffers from(kFloat, {{1, 2, 3}, {4}}), to(kFloat, {{0}, {0, 0, 0}});
        ranks.each([&](auto rank) {
            return HcclAlltoAllV(from[rank], counts[rank], sent[rank], kFloat, to[rank], received[rank], places[rank],
                                 kFloat, ranks.comm(rank), ranks.stream(rank));
        });
        ranks.wait();
        to.expect_rank(0, {1}, "the parts");
        to.expect_rank(1, {4, 2, 3}, "the parts in the places of HcclAlltoAllV");
        ranks.each([&](auto rank) {
            return HcclAlltoAllVC(from[rank], counts, kFloat, to[rank], kFloat, ranks.comm(rank), ranks.stream(rank));
        });
        ranks.wait();
        to.expect_rank(1, {2, 3, 4}, "the parts of HcclAlltoAllVC");
    }};

const Case alone{"collectives/of_one_rank", [] {
                     const Ranks ranks(1);
                     const Buffers from(kFloat, {{1, 2}}), to(kFloat, 1, 2);
                     expect_equal(HcclAllReduce(from[0], to[0], 2, kFloat, kSum, ranks.comm(0), ranks.stream(0)),
                                  HCCL_SUCCESS, "the status");
                     expect_equal(HcclBarrier(ranks.comm(0), ranks.stream(0)), HCCL_SUCCESS, "the barrier's status");
                     ranks.wait();
                     to.expect_all({1, 2}, "the result");
                 }};

const Case nothing{"collectives/of_no_elements", [] {
                       const Ranks ranks(2);
                       ranks.each([&](auto rank) {
                           return HcclAllReduce(nullptr, nullptr, 0, kFloat, kSum, ranks.comm(rank),
                                                ranks.stream(rank));
                       });
                       ranks.wait();
                   }};

const Case asynchronous{
    "collectives/the_caller_does_not_wait", [] {
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
    }};

const Case barrier{"collectives/barrier_waits_for_all", [] {
                       const Ranks ranks(2);
                       expect_equal(HcclBarrier(ranks.comm(0), ranks.stream(0)), HCCL_SUCCESS, "the status");
                       expect_equal(aclrtSynchronizeStreamWithTimeout(ranks.stream(0), 30), 507046,
                                    "the status before the other rank");
                       recent_error();
                       expect_equal(HcclBarrier(ranks.comm(1), ranks.stream(1)), HCCL_SUCCESS, "the status");
                       ranks.wait();
                   }};

const Case two_streams{
    "collectives/on_two_streams_in_the_order_of_their_calls", [] {
        const Ranks ranks(2);
        const Stream others[2];
        const Buffers first(kFloat, {{1}, {2}}), second(kFloat, {{10}, {20}});
        ranks.each([&](auto rank) {
            return HcclAllReduce(first[rank], first[rank], 1, kFloat, kSum, ranks.comm(rank), ranks.stream(rank));
        });
        ranks.each([&](auto rank) {
            return HcclAllReduce(second[rank], second[rank], 1, kFloat, kSum, ranks.comm(rank), others[rank].handle);
        });
        ranks.wait();
        for (const auto& other : others) expect_equal(other.wait(), 0, "the other stream's status");
        first.expect_all({3}, "the first sums");
        second.expect_all({30}, "the second sums");
    }};

const Case chips{"collectives/what_a_chip_reduces",
                 [] {
                     const Ranks ranks(1);
                     const Buffers data(HCCL_DATA_TYPE_FP64, 1, 1);
                     const auto status = [&](HcclDataType dtype, HcclReduceOp op) {
                         const auto result =
                             HcclAllReduce(data[0], data[0], 1, dtype, op, ranks.comm(0), ranks.stream(0));
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
                 },
                 {"Ascend910", "Ascend910B", "Ascend910_93", "Ascend310P", "Ascend950"}};

}  // namespace
