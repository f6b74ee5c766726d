// Communication for operators that compute and communicate, which identify a communicator by name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ascendcl/device.h"
#include "hccl/call.h"

namespace host_npu::hccl {

// A communicator, or the reason why an operator cannot use it.
struct Named {
    Rank rank = 0;
    std::uint32_t ranks = 0;
    std::string refusal;
};

HOST_NPU_EXPORT Named find_named(const std::string& name);

// The communication of such an operator, on device memory.
struct Fused {
    Function function;
    std::string communicator;
    // The number of ranks in phase one; since then, another communicator may have taken the name.
    std::uint32_t ranks;
    HcclDataType dtype;
    // The number of elements that this rank sends to each rank.
    std::uint64_t count;
    // The numbers of elements sent to and received from each rank, if they differ; otherwise empty.
    std::vector<std::uint64_t> sent, received;

    // Whether every rank receives the data of all ranks; otherwise the data is summed.
    bool gathers() const { return function != Function::MatmulAllReduce && function != Function::MatmulReduceScatter; }
};

// Assigns the call's number in the communicator and enqueues it on the stream. Returns the reason if it is refused.
HOST_NPU_EXPORT std::optional<std::string> communicate(const Fused& fused, void* send_buffer, void* receive_buffer,
                                                       void* stream);

}  // namespace host_npu::hccl
