// Communicators: creation, queries, splits and destruction.
#include <cstdlib>
#include <cstring>
#include <thread>

#include "tests/ranks.h"

namespace {

using namespace test;

constexpr auto kFloat = HCCL_DATA_TYPE_FP32;

std::string name_of(HcclComm comm) {
    char name[COMM_NAME_MAX_LENGTH];
    expect_equal(HcclGetCommName(comm, name), HCCL_SUCCESS, "HcclGetCommName's status");
    return name;
}

void expect_refused(HcclResult actual, HcclResult expected, const std::string& part) {
    expect_equal(actual, expected, "the status");
    expect_contains(recent_error().value_or("no message"), part);
}

CASE("communicators/know_their_name_size_and_rank") {
    auto config = limited_to(60);
    std::strcpy(config.hcclCommName, "a name");
    const Ranks named(3, config), unnamed(1), other(1);
    std::uint32_t size = 0, rank = 0;
    expect_equal(HcclGetRankSize(named.comm(2), &size), HCCL_SUCCESS, "the status");
    expect_equal(HcclGetRankId(named.comm(2), &rank), HCCL_SUCCESS, "the status");
    expect_equal(size, 3u, "the size");
    expect_equal(rank, 2u, "the rank");
    expect_equal(name_of(named.comm(0)), "a name", "the name");
    expect(name_of(unnamed.comm(0)) != name_of(other.comm(0)), "two communicators have one name");
    HcclResult error = HCCL_E_INTERNAL;
    expect_equal(HcclGetCommAsyncError(named.comm(0), &error), HCCL_SUCCESS, "the status");
    expect_equal(error, HCCL_SUCCESS, "the error");
    expect_equal(HcclGetCommConfigCapability(), HCCL_COMM_CONFIG_RESERVED, "the capability");
}

CASE("communicators/refusals") {
    HcclRootInfo root_info;
    HcclComm comm = nullptr;
    expect_refused(HcclGetRootInfo(nullptr), HCCL_E_PTR, "rootInfo is null");
    expect_equal(HcclGetRootInfo(&root_info), HCCL_SUCCESS, "the status");
    expect_refused(HcclCommInitRootInfo(0, &root_info, 0, &comm), HCCL_E_PARA, "nRanks must be from 1");
    expect_refused(HcclCommInitRootInfo(2, &root_info, 2, &comm), HCCL_E_PARA, "rank must be below nRanks");
    expect_refused(HcclCommInitRootInfo(2, nullptr, 0, &comm), HCCL_E_PTR, "rootInfo is null");
    expect_refused(HcclCommInitRootInfo(2, &root_info, 0, nullptr), HCCL_E_PTR, "comm is null");
    HcclRootInfo foreign{};
    expect_refused(HcclCommInitRootInfo(1, &foreign, 0, &comm), HCCL_E_PARA, "not from HcclGetRootInfo");
    HcclCommConfig config{};
    expect_refused(HcclCommInitRootInfoConfig(1, &root_info, 0, &config, &comm), HCCL_E_PARA, "HcclCommConfigInit");
    expect_equal(HcclCommInitRootInfo(1, &root_info, 0, &comm), HCCL_SUCCESS, "the status");
    const auto used = comm;
    expect_refused(HcclCommInitRootInfo(1, &root_info, 0, &comm), HCCL_E_TCP_CONNECT, "for a communicator already");
    expect_equal(HcclCommDestroy(used), HCCL_SUCCESS, "the status");
    expect_refused(HcclCommDestroy(used), HCCL_E_PARA, "not a live communicator");
    expect_refused(HcclCommDestroy(nullptr), HCCL_E_PTR, "comm is null");
    const Ranks ranks(1);
    expect_refused(HcclBroadcast(nullptr, 1, kFloat, 0, ranks.comm(0), nullptr), HCCL_E_PTR, "is null");
    expect_refused(HcclBroadcast(&comm, 1, kFloat, 1, ranks.comm(0), nullptr), HCCL_E_PARA, "root must be below 1");
    expect_refused(HcclBroadcast(&comm, 1, HCCL_DATA_TYPE_RESERVED, 0, ranks.comm(0), nullptr), HCCL_E_NOT_SUPPORT,
                   "there is no data type 255");
    expect_refused(HcclAllReduce(&comm, &comm, 1, kFloat, HCCL_REDUCE_RESERVED, ranks.comm(0), nullptr),
                   HCCL_E_NOT_SUPPORT, "there is no reduction 255");
}

CASE("communicators/ranks_that_disagree_about_them") {
    HcclRootInfo root_info;
    HcclComm comm = nullptr, other = nullptr;
    HcclGetRootInfo(&root_info);
    HcclGroupStart();
    expect_equal(HcclCommInitRootInfo(2, &root_info, 0, &comm), HCCL_SUCCESS, "the status");
    expect_refused(HcclCommInitRootInfo(3, &root_info, 1, &other), HCCL_E_PARA,
                   "gives nRanks=3 where another rank gave nRanks=2");
    expect_refused(HcclCommInitRootInfo(2, &root_info, 0, &other), HCCL_E_PARA, "rank 0 is taken");
    expect_equal(HcclCommInitRootInfo(2, &root_info, 1, &other), HCCL_SUCCESS, "the status");
    expect_equal(HcclGroupEnd(), HCCL_SUCCESS, "the end's status");
    HcclCommDestroy(comm);
    HcclCommDestroy(other);
}

CASE("communicators/of_all_devices_of_a_process") {
    std::uint32_t count = 0;
    aclrtGetDeviceCount(&count);
    std::vector<std::int32_t> devices(count);
    for (std::uint32_t index = 0; index < count; ++index) devices[index] = index;
    std::vector<HcclComm> comms(count);
    expect_equal(HcclCommInitAll(count, devices.data(), comms.data()), 0, "the status");
    const Buffers data(kFloat, count, 1, 2);
    std::vector<Stream> streams(count);
    for (std::uint32_t rank = 0; rank < count; ++rank) {
        HcclAllReduce(data[rank], data[rank], 1, kFloat, HCCL_REDUCE_SUM, comms[rank], streams[rank].handle);
    }
    for (const auto& stream : streams) expect_equal(stream.wait(), 0, "the stream's status");
    data.expect_all({2.0 * count}, "the sums");
    for (const auto comm : comms) HcclCommDestroy(comm);
    HcclComm none = nullptr;
    std::int32_t missing = 1000, same[] = {0, 0};
    expect_refused(HcclCommInitAll(1, &missing, &none), HCCL_E_PARA, "devices must be from 0");
    expect_refused(HcclCommInitAll(2, same, &none), HCCL_E_PARA, "devices must differ");
}

// A communicator of ranks 2 and 0 of three.
CASE("communicators/split") {
    const Ranks ranks(3);
    std::uint32_t chosen[] = {2, 0};
    auto config = limited_to(60);
    HcclComm sub[2] = {}, none = &config;
    HcclComm parents[] = {ranks.comm(0), ranks.comm(1), ranks.comm(2)};
    HcclResult status[2];
    const auto join = [&](std::uint32_t rank) {
        auto* const parent = &parents[chosen[rank]];
        status[rank] = HcclCreateSubCommConfig(parent, 2, chosen, 7, rank, &config, &sub[rank]);
    };
    std::thread other(join, 1);
    join(0);
    other.join();
    for (const auto each : status) expect_equal(each, HCCL_SUCCESS, "the status");
    expect_equal(HcclCreateSubCommConfig(&parents[1], 0, nullptr, 0xFFFFFFFF, 0, &config, &none), 0,
                 "the status of the rank that is not in it");
    expect(none == nullptr, "the rank that is not in it has a communicator");
    const Buffers data(kFloat, {{1}, {2}});
    for (const std::uint32_t rank : {0, 1}) {
        HcclBroadcast(data[rank], 1, kFloat, 0, sub[rank], ranks.stream(chosen[rank]));
    }
    ranks.wait();
    data.expect_all({1}, "what rank 2 has sent");
    for (auto* const comm : sub) HcclCommDestroy(comm);
    expect_refused(HcclCreateSubCommConfig(&parents[0], 2, chosen, 8, 0, &config, &sub[0]), HCCL_E_PARA,
                   "must be the caller's rank");
}

CASE("communicators/a_limit_that_is_no_number") {
    setenv("HCCL_EXEC_TIMEOUT", "soon", 1);
    HcclRootInfo root_info;
    HcclGetRootInfo(&root_info);
    HcclComm comm = nullptr;
    const auto status = HcclCommInitRootInfo(1, &root_info, 0, &comm);
    unsetenv("HCCL_EXEC_TIMEOUT");
    expect_refused(status, HCCL_E_PARA, "HCCL_EXEC_TIMEOUT must be");
}

}  // namespace
