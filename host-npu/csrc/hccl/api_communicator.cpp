// The functions of communicators.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <iterator>
#include <vector>

#include "hccl/api.h"
#include "hccl/group.h"
#include "hccl/hccl.h"
#include "hccl/rendezvous.h"

using namespace host_npu::hccl;

namespace {

std::array<std::atomic<std::int32_t>, HCCL_CONFIG_RESERVED> configuration{};

void require_ranks(std::uint32_t world_size, Rank rank) {
    require(world_size > 0 && world_size <= kMostRanks,
            "nRanks must be from 1 to " + std::to_string(kMostRanks) + ", got " + std::to_string(world_size));
    require(rank < world_size,
            "rank must be below nRanks, which is " + std::to_string(world_size) + ", got " + std::to_string(rank));
}

Settings settings_of(const HcclCommConfig* config) {
    Settings settings{{}, execution_limit()};
    if (config == nullptr) return settings;
    std::uint32_t magic = 0;
    std::memcpy(&magic, config->reserved + sizeof(std::size_t), sizeof magic);
    require(magic == HCCL_COMM_CONFIG_MAGIC_WORD, "config was not initialised by HcclCommConfigInit");
    settings.name = std::string(config->hcclCommName, strnlen(config->hcclCommName, sizeof config->hcclCommName));
    require(settings.name.size() < sizeof config->hcclCommName, "config's hcclCommName has no terminating zero");
    if (config->hcclExecTimeOut == HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET) return settings;
    require(config->hcclExecTimeOut >= 0,
            "config's hcclExecTimeOut must be at least 0, got " + std::to_string(config->hcclExecTimeOut));
    settings.execution_limit.reset();
    if (config->hcclExecTimeOut > 0) settings.execution_limit = std::chrono::seconds(config->hcclExecTimeOut);
    return settings;
}

HcclComm join_and_wait(std::uint32_t world_size, const HcclRootInfo* root_info, Rank rank,
                       const HcclCommConfig* config) {
    require(root_info, "rootInfo");
    require_ranks(world_size, rank);
    const auto communicator = join(*root_info, world_size, rank, settings_of(config));
    if (group().depth > 0) {
        group().joined.push_back({communicator, *root_info});
    } else {
        wait_for_all(*communicator, *root_info);
    }
    return communicators().add(communicator);
}

}  // namespace

HOST_NPU_EXPORT HcclResult HcclGetRootInfo(HcclRootInfo* rootInfo) {
    return answer(__func__, rootInfo, "rootInfo", [&] { return make_root_info(); });
}

HOST_NPU_EXPORT HcclResult HcclGetRootInfoScalable(HcclRootInfo* rootInfo) {
    return answer(__func__, rootInfo, "rootInfo", [&] { return make_root_info(); });
}

HOST_NPU_EXPORT HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank,
                                                HcclComm* comm) {
    return answer(__func__, comm, "comm", [&] { return join_and_wait(nRanks, rootInfo, rank, nullptr); });
}

HOST_NPU_EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank,
                                                      const HcclCommConfig* config, HcclComm* comm) {
    return answer(__func__, comm, "comm", [&] {
        require(config, "config");
        return join_and_wait(nRanks, rootInfo, rank, config);
    });
}

// One root suffices: all ranks are on one machine.
HOST_NPU_EXPORT HcclResult HcclCommInitRootInfoScalable(uint32_t nRanks, uint32_t nRoot,
                                                        const HcclRootInfo* rootInfoList, uint32_t rank,
                                                        uint32_t nExtRoot, const HcclCommConfig* config,
                                                        HcclComm* comm) {
    return answer(__func__, comm, "comm", [&] {
        require(nRoot > 0 && nRoot <= nRanks, "nRoot must be from 1 to nRanks, got " + std::to_string(nRoot));
        require(nExtRoot == 0, "nExtRoot must be 0, got " + std::to_string(nExtRoot));
        return join_and_wait(nRanks, rootInfoList, rank, config);
    });
}

HOST_NPU_EXPORT HcclResult HcclCommInitAll(uint32_t ndev, int32_t* devices, HcclComm* comms) {
    return run_api(__func__, [&] {
        require(devices, "devices");
        require(comms, "comms");
        require_ranks(ndev, 0);
        std::vector<std::int32_t> sorted(devices, devices + ndev);
        std::sort(sorted.begin(), sorted.end());
        std::uint32_t count = 0;
        aclrtGetDeviceCount(&count);
        require(sorted.front() >= 0 && sorted.back() < static_cast<std::int32_t>(count),
                "devices must be from 0 to " + std::to_string(count - 1));
        require(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "devices must differ");
        const auto root_info = make_root_info();
        const auto settings = settings_of(nullptr);
        std::vector<std::shared_ptr<Communicator>> made;
        for (Rank rank = 0; rank < ndev; ++rank) made.push_back(join(root_info, ndev, rank, settings));
        wait_for_all(*made.front(), root_info);
        for (Rank rank = 0; rank < ndev; ++rank) comms[rank] = communicators().add(made[rank]);
    });
}

HOST_NPU_EXPORT HcclResult HcclCreateSubCommConfig(HcclComm* comm, uint32_t rankNum, uint32_t* rankIds,
                                                   uint64_t subCommId, uint32_t subCommRankId, HcclCommConfig* config,
                                                   HcclComm* subComm) {
    return run_api(__func__, [&] {
        require(comm, "comm");
        require(subComm, "subComm");
        const auto parent = communicator_of(*comm);
        // This rank is not a member.
        constexpr std::uint64_t kNoSubCommunicator = 0xFFFFFFFF;
        if (rankIds == nullptr && subCommId == kNoSubCommunicator) {
            *subComm = nullptr;
            return;
        }
        require(rankIds, "rankIds");
        require(config, "config");
        require_ranks(rankNum, subCommRankId);
        const std::span<const Rank> ranks(rankIds, rankNum);
        for (const auto rank : ranks) {
            require(rank < parent->size(), "rankIds must be ranks of comm, got " + std::to_string(rank));
        }
        require(ranks[subCommRankId] == parent->rank(), "rankIds[subCommRankId] must be the caller's rank, which is " +
                                                            std::to_string(parent->rank()) + ", got " +
                                                            std::to_string(ranks[subCommRankId]));
        *subComm =
            communicators().add(join_sub_communicator(*parent, ranks, subCommId, subCommRankId, settings_of(config)));
    });
}

HOST_NPU_EXPORT HcclResult HcclCommDestroy(HcclComm comm) {
    return run_api(__func__, [&] {
        require(comm, "comm");
        try {
            const auto communicator = communicators().remove(comm);
            if (communicator->is_of_this_process()) communicator->leave();
        } catch (const host_npu::Error&) {
            throw Refusal(HCCL_E_PARA, "comm is not a live communicator");
        }
    });
}

HOST_NPU_EXPORT HcclResult HcclGetCommName(HcclComm comm, char* commName) {
    return run_api(__func__, [&] {
        require(commName, "commName");
        const auto communicator = communicator_of(comm);
        const auto length = communicator->name().copy(commName, COMM_NAME_MAX_LENGTH - 1);
        commName[length] = '\0';
    });
}

HOST_NPU_EXPORT HcclResult HcclGetRankSize(HcclComm comm, uint32_t* rankSize) {
    return answer(__func__, rankSize, "rankSize", [&] { return communicator_of(comm)->size(); });
}

HOST_NPU_EXPORT HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
    return answer(__func__, rank, "rank", [&] { return communicator_of(comm)->rank(); });
}

HOST_NPU_EXPORT HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* asyncError) {
    return run_api(__func__, [&] {
        require(asyncError, "asyncError");
        const auto communicator = communicator_of(comm);
        *asyncError = communicator->failure();
        // torch_npu appends the message to that of its watchdog.
        if (const auto text = communicator->untold_failure()) {
            host_npu::report_error(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, *text);
        }
    });
}

HOST_NPU_EXPORT uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

HOST_NPU_EXPORT HcclResult HcclSetConfig(HcclConfig config, HcclConfigValue configValue) {
    return run_api(__func__, [&] {
        require(config >= 0 && config < HCCL_CONFIG_RESERVED, "there is no config " + std::to_string(config));
        configuration[config] = configValue.value;
    });
}

HOST_NPU_EXPORT HcclResult HcclGetConfig(HcclConfig config, HcclConfigValue* configValue) {
    return run_api(__func__, [&] {
        require(config >= 0 && config < HCCL_CONFIG_RESERVED, "there is no config " + std::to_string(config));
        require(configValue, "configValue");
        configValue->value = configuration[config];
    });
}
