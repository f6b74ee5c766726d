// The calls of a thread since HcclGroupStart, which run at the end of the group.
#pragma once

#include <memory>
#include <vector>

#include "hccl/communicator.h"
#include "hccl/messages.h"

namespace host_npu::hccl {

// Messages that are transferred concurrently.
struct Batch {
    std::shared_ptr<Communicator> communicator;
    void* stream;
    std::vector<Message> messages;
};

// A communicator whose other ranks this thread may also create.
struct Joined {
    std::shared_ptr<Communicator> communicator;
    HcclRootInfo root_info;
};

struct Group {
    // The nesting depth of HcclGroupStart.
    int depth = 0;
    std::vector<Batch> batches;
    std::vector<Joined> joined;
};

// The group of the calling thread.
Group& group();

// Adds messages to the batch of the same communicator and stream.
void add_to_group(Batch batch);

// Enqueues a batch on its stream as a call of `function`.
void launch(const Batch& batch, Function function);

}  // namespace host_npu::hccl
