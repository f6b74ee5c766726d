#include "hccl/group.h"

#include <algorithm>
#include <utility>

#include "hccl/api.h"
#include "hccl/hccl.h"
#include "hccl/rendezvous.h"

namespace host_npu::hccl {

Group& group() {
    thread_local Group all;
    return all;
}

void add_to_group(Batch batch) {
    auto& batches = group().batches;
    const auto same = std::find_if(batches.begin(), batches.end(), [&](const Batch& other) {
        return other.communicator == batch.communicator && other.stream == batch.stream;
    });
    if (same == batches.end()) {
        batches.push_back(std::move(batch));
    } else {
        same->messages.insert(same->messages.end(), batch.messages.begin(), batch.messages.end());
    }
}

void launch(const Batch& batch, Function function) {
    require_intact(*batch.communicator);
    const auto status = enqueue(batch.communicator, function, batch.messages, batch.stream);
    require(status == ACL_SUCCESS, "the stream took no work", HCCL_E_RUNTIME);
}

}  // namespace host_npu::hccl

using namespace host_npu::hccl;

HOST_NPU_EXPORT HcclResult HcclGroupStart() {
    return run_api(__func__, [] { ++group().depth; });
}

HOST_NPU_EXPORT HcclResult HcclGroupEnd() {
    return run_api(__func__, [] {
        require(group().depth > 0, "there was no HcclGroupStart", HCCL_E_NOT_SUPPORT);
        if (--group().depth > 0) return;
        const auto joined = std::exchange(group().joined, {});
        const auto batches = std::exchange(group().batches, {});
        for (const auto& [communicator, root_info] : joined) wait_for_all(*communicator, root_info);
        for (const auto& batch : batches) launch(batch, Function::BatchSendRecv);
    });
}
