// Collectives. Each is an exchange: every rank publishes its data and reads its part of the others' data.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hccl/communicator.h"

namespace host_npu::hccl {

// A part of a buffer, in elements.
struct Part {
    std::uint64_t start = 0;
    std::uint64_t count = 0;
};

struct Exchange {
    Function function;
    HcclDataType dtype;
    HcclReduceOp op = HCCL_REDUCE_RESERVED;
    Rank root = kNoRank;
    // The argument `count` of the function.
    std::uint64_t count = 0;
    const void* send_buffer = nullptr;
    void* receive_buffer = nullptr;
    // The parts sent to and received from each rank. A reduction receives the same part from every rank.
    std::vector<Part> send;
    std::vector<Part> receive;
    // Whether a rank sends the same data to all ranks that receive from it.
    bool same_for_all = true;

    // The number of distinct bytes that other ranks read from this rank.
    std::uint64_t bytes_from(Rank rank) const;
};

// Enqueues the exchange on the stream. Returns an ACL status.
std::int32_t enqueue(const std::shared_ptr<Communicator>& communicator, Exchange exchange, void* stream);

}  // namespace host_npu::hccl
