// The rendezvous of ranks by a root info, which identifies the shared memory of a communicator.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hccl/communicator.h"

namespace host_npu::hccl {

struct Settings {
    // If empty, the name is derived from the root info.
    std::string name;
    Limit execution_limit;
};

// HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT, or HCCL's defaults. Both throw Refusal for an invalid value.
std::chrono::seconds connect_limit();
Limit execution_limit();

HcclRootInfo make_root_info();

// Claims the seat of a rank.
std::shared_ptr<Communicator> join(const HcclRootInfo& root_info, std::uint32_t world_size, Rank rank,
                                   const Settings& settings);

// Waits until all ranks have joined.
void wait_for_all(Communicator& communicator, const HcclRootInfo& root_info);

// Creates a sub-communicator of some ranks of `parent`, in which this rank is `rank`.
std::shared_ptr<Communicator> join_sub_communicator(Communicator& parent, std::span<const Rank> ranks, std::uint64_t id,
                                                    Rank rank, const Settings& settings);

}  // namespace host_npu::hccl
