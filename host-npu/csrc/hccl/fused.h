// Communication of operators that compute and communicate at once, which know a communicator by its name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ascendcl/device.h"
#include "hccl/call.h"

namespace host_npu::hccl {

// A communicator, or why there is none that an operator could use.
struct Named {
    Rank rank = 0;
    std::uint32_t ranks = 0;
    std::string refusal;
};

HOST_NPU_EXPORT Named find_named(const std::string& name);

// What such an operator sends and receives, in device memory.
struct Fused {
    Function function;
    std::string communicator;
    // What phase one has found; another communicator may have taken the name since.
    std::uint32_t ranks;
    HcclDataType dtype;
    // How many elements this rank sends to each other rank.
    std::uint64_t count;
    // Where ranks get other elements, how many go to each and come from each.
    std::vector<std::uint64_t> sent, received;

    // Whether every rank receives what each sends; the others sum.
    bool gathers() const { return function != Function::MatmulAllReduce && function != Function::MatmulReduceScatter; }
};

// Takes the call's number in the communicator and enqueues it on the stream. Returns why it is refused, if it is.
HOST_NPU_EXPORT std::optional<std::string> communicate(const Fused& fused, void* send_buffer, void* receive_buffer,
                                                       void* stream);

}  // namespace host_npu::hccl
