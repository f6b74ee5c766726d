// Point-to-point messages. A send is matched with the receive of the same number.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hccl/communicator.h"

namespace host_npu::hccl {

struct Message {
    bool is_send;
    void* buffer;
    std::uint64_t count;
    HcclDataType dtype;
    Rank peer;
};

// Enqueues messages for concurrent transfer, as a call of `function`. Returns an ACL status.
std::int32_t enqueue(const std::shared_ptr<Communicator>& communicator, Function function,
                     const std::vector<Message>& messages, void* stream);

}  // namespace host_npu::hccl
