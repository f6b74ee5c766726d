// Point-to-point messages, single and in batches.
#include "hccl/api.h"
#include "hccl/group.h"
#include "hccl/hccl.h"

using namespace host_npu::hccl;

namespace {

void check(const Communicator& communicator, const Message& message) {
    require(item_size(message.dtype) > 0, "there is no " + name_of(message.dtype), HCCL_E_NOT_SUPPORT);
    require(message.peer < communicator.size(), "the other rank must be below " + std::to_string(communicator.size()) +
                                                    ", got " + std::to_string(message.peer));
    const char* const buffer = message.is_send ? "sendBuf" : "recvBuf";
    require(message.count <= kMostElements,
            std::string(buffer) + " has more than " + std::to_string(kMostElements) + " elements");
    if (message.count > 0) require(message.buffer, buffer);
}

HcclResult send_or_receive(const char* function, HcclComm comm, aclrtStream stream, const Message& message) {
    return run_api(function, [&] {
        const auto communicator = communicator_of(comm);
        check(*communicator, message);
        const bool is_own = message.peer == communicator->rank();
        // A send waits for its receive, so a message to oneself outside of a group would deadlock.
        require(!is_own || group().depth > 0, "the other rank is the caller's own, outside of a group");
        const auto bytes = message.is_send && !is_own ? message.count * item_size(message.dtype) : 0;
        if (group().depth > 0) {
            add_to_group({communicator, stream, {message}});
        } else {
            launch({communicator, stream, {message}}, message.is_send ? Function::Send : Function::Recv);
        }
        host_npu::count_collective(function, static_cast<std::int64_t>(bytes));
    });
}

}  // namespace

HOST_NPU_EXPORT HcclResult HcclSend(void* sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank,
                                    HcclComm comm, aclrtStream stream) {
    return send_or_receive(__func__, comm, stream, {true, sendBuf, count, dataType, destRank});
}

HOST_NPU_EXPORT HcclResult HcclRecv(void* recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank,
                                    HcclComm comm, aclrtStream stream) {
    return send_or_receive(__func__, comm, stream, {false, recvBuf, count, dataType, srcRank});
}

HOST_NPU_EXPORT HcclResult HcclBatchSendRecv(HcclSendRecvItem* sendRecvInfo, uint32_t itemNum, HcclComm comm,
                                             aclrtStream stream) {
    return run_api(__func__, [&] {
        require(sendRecvInfo, "sendRecvInfo");
        require(itemNum > 0, "itemNum is 0");
        const auto communicator = communicator_of(comm);
        Batch batch{communicator, stream, {}};
        std::int64_t bytes = 0;
        for (std::uint32_t index = 0; index < itemNum; ++index) {
            const auto& item = sendRecvInfo[index];
            require(item.sendRecvType == HCCL_SEND || item.sendRecvType == HCCL_RECV,
                    "item " + std::to_string(index) + " is neither a send nor a receive");
            const bool is_send = item.sendRecvType == HCCL_SEND;
            batch.messages.push_back({is_send, item.buf, item.count, item.dataType, item.remoteRank});
            check(*communicator, batch.messages.back());
            if (is_send && item.remoteRank != communicator->rank()) {
                bytes += static_cast<std::int64_t>(item.count * item_size(item.dataType));
            }
        }
        launch(batch, Function::BatchSendRecv);
        host_npu::count_collective(__func__, bytes);
    });
}
