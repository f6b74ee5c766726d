// Parts of buffers and checks, shared by functions that exchange data between all ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hccl/api.h"
#include "hccl/exchange.h"

namespace host_npu::hccl {

using Parts = std::vector<Part>;

inline Parts same_part(const Communicator& communicator, std::uint64_t count) {
    return {communicator.size(), {0, count}};
}

inline Parts no_part(const Communicator& communicator) { return Parts(communicator.size()); }

// Returns consecutive parts of the same size.
inline Parts equal_parts(const Communicator& communicator, std::uint64_t count) {
    Parts parts;
    for (Rank rank = 0; rank < communicator.size(); ++rank) parts.push_back({rank * count, count});
    return parts;
}

// Checks the exchange, enqueues it on the stream and counts it as a call of `function`. Throws Refusal.
void enqueue_collective(const char* function, const std::shared_ptr<Communicator>& communicator, Exchange exchange,
                        void* stream);

}  // namespace host_npu::hccl
