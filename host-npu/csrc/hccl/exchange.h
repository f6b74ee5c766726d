// Collectives. All of them are one exchange: each rank shows what it sends, and takes what concerns it.
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
    // The argument of this name.
    std::uint64_t count = 0;
    const void* send_buffer = nullptr;
    void* receive_buffer = nullptr;
    // What goes to each rank and comes from each. What is reduced comes from every rank to the same place.
    std::vector<Part> send;
    std::vector<Part> receive;
    // Whether all ranks that are sent something are sent the same.
    bool same_for_all = true;

    // Bytes that others read of this rank, each counted once.
    std::uint64_t bytes_from(Rank rank) const;
};

// Puts the exchange on the stream. Returns an ACL status.
std::int32_t enqueue(const std::shared_ptr<Communicator>& communicator, Exchange exchange, void* stream);

}  // namespace host_npu::hccl
