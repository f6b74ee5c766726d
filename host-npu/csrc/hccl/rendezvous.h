// How ranks find each other: by a root info, which says who has the shared memory of a communicator.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hccl/communicator.h"

namespace host_npu::hccl {

struct Settings {
    // Made of the root info if it is empty.
    std::string name;
    Limit execution_limit;
};

// What HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT say, or HCCL's defaults. Both throw Refusal if it is no number.
std::chrono::seconds connect_limit();
Limit execution_limit();

HcclRootInfo make_root_info();

// Takes the seat of a rank.
std::shared_ptr<Communicator> join(const HcclRootInfo& root_info, std::uint32_t world_size, Rank rank,
                                   const Settings& settings);

// Waits until all ranks are there.
void wait_for_all(Communicator& communicator, const HcclRootInfo& root_info);

// The communicator of some ranks of another, of which this one is number `rank`.
std::shared_ptr<Communicator> join_sub_communicator(Communicator& parent, std::span<const Rank> ranks, std::uint64_t id,
                                                    Rank rank, const Settings& settings);

}  // namespace host_npu::hccl
