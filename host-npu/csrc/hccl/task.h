// Calls of a communicator, as tasks of a stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "hccl/communicator.h"

namespace host_npu::hccl {

// Formats a position, for example "in call 7, AllReduce(count=8, fp32, sum), of communicator group_name_0".
std::string where(const Communicator& communicator, const CallHead& head);

// Enqueues `body` on `stream` and returns an ACL status. If the body fails, or the stream drops it, the communicator
// fails on all ranks, because the others wait for this rank.
std::int32_t enqueue_task(std::shared_ptr<Communicator> communicator, const CallHead& head, void* stream,
                          std::function<void()> body);

}  // namespace host_npu::hccl
