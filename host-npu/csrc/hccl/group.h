// What a thread has called since HcclGroupStart, and is done when the group ends.
#pragma once

#include <memory>
#include <vector>

#include "hccl/communicator.h"
#include "hccl/messages.h"

namespace host_npu::hccl {

// Messages that go on at the same time.
struct Batch {
    std::shared_ptr<Communicator> communicator;
    void* stream;
    std::vector<Message> messages;
};

// A communicator whose other ranks this thread may have to make too.
struct Joined {
    std::shared_ptr<Communicator> communicator;
    HcclRootInfo root_info;
};

struct Group {
    // How often HcclGroupStart was called.
    int depth = 0;
    std::vector<Batch> batches;
    std::vector<Joined> joined;
};

// The calling thread's.
Group& group();

// Messages of one communicator on one stream go on together.
void add_to_group(Batch batch);

// Puts a batch on its stream as a call of `function`.
void launch(const Batch& batch, Function function);

}  // namespace host_npu::hccl
