// Collectives: the parts of buffers that each function exchanges.
#include <utility>
#include <vector>

#include "hccl/collective.h"
#include "hccl/hccl.h"

using namespace host_npu::hccl;

namespace {

// Parts given by two arrays of 64-bit integers.
Parts parts_of(const Communicator& communicator, const void* counts, const char* name_of_counts,
               const void* displacements, const char* name_of_displacements) {
    require(counts, name_of_counts);
    require(displacements, name_of_displacements);
    Parts parts;
    for (Rank rank = 0; rank < communicator.size(); ++rank) {
        parts.push_back(
            {static_cast<const std::uint64_t*>(displacements)[rank], static_cast<const std::uint64_t*>(counts)[rank]});
    }
    return parts;
}

// Keeps only the part of this rank.
Parts only(Parts parts, Rank rank) {
    for (Rank other = 0; other < parts.size(); ++other) {
        if (other != rank) parts[other] = {};
    }
    return parts;
}

Exchange reduced(Function function, HcclDataType dtype, HcclReduceOp op, Rank root, std::uint64_t count,
                 const void* send_buffer, const void* receive_buffer, Parts send, Parts receive,
                 bool same_for_all = true) {
    auto* const target = const_cast<void*>(receive_buffer);
    return {function, dtype, op, root, count, send_buffer, target, std::move(send), std::move(receive), same_for_all};
}

Exchange moved(Function function, HcclDataType dtype, Rank root, std::uint64_t count, const void* send_buffer,
               const void* receive_buffer, Parts send, Parts receive, bool same_for_all = true) {
    return reduced(function, dtype, HCCL_REDUCE_RESERVED, root, count, send_buffer, receive_buffer, std::move(send),
                   std::move(receive), same_for_all);
}

// `exchange_of` returns the exchange for a communicator.
template <class ExchangeOf>
HcclResult collective(const char* function, HcclComm comm, aclrtStream stream, const ExchangeOf& exchange_of) {
    return run_api(function, [&] {
        const auto communicator = communicator_of(comm);
        enqueue_collective(function, communicator, exchange_of(*communicator), stream);
    });
}

}  // namespace

HOST_NPU_EXPORT HcclResult HcclAllReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType,
                                         HcclReduceOp op, HcclComm comm, aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        return reduced(Function::AllReduce, dataType, op, kNoRank, count, sendBuf, recvBuf, same_part(all, count),
                       same_part(all, count));
    });
}

HOST_NPU_EXPORT HcclResult HcclReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType,
                                      HcclReduceOp op, uint32_t root, HcclComm comm, aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        return reduced(Function::Reduce, dataType, op, root, count, sendBuf, recvBuf, only(same_part(all, count), root),
                       all.rank() == root ? same_part(all, count) : no_part(all));
    });
}

HOST_NPU_EXPORT HcclResult HcclReduceScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType,
                                             HcclReduceOp op, HcclComm comm, aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        return reduced(Function::ReduceScatter, dataType, op, kNoRank, recvCount, sendBuf, recvBuf,
                       equal_parts(all, recvCount), same_part(all, recvCount), false);
    });
}

HOST_NPU_EXPORT HcclResult HcclReduceScatterV(void* sendBuf, const void* sendCounts, const void* sendDispls,
                                              void* recvBuf, uint64_t recvCount, HcclDataType dataType, HcclReduceOp op,
                                              HcclComm comm, aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        // Ranks have different counts.
        return reduced(Function::ReduceScatterV, dataType, op, kNoRank, 0, sendBuf, recvBuf,
                       parts_of(all, sendCounts, "sendCounts", sendDispls, "sendDispls"), same_part(all, recvCount),
                       false);
    });
}

HOST_NPU_EXPORT HcclResult HcclBroadcast(void* buf, uint64_t count, HcclDataType dataType, uint32_t root, HcclComm comm,
                                         aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        const bool is_root = all.rank() == root;
        return moved(Function::Broadcast, dataType, root, count, buf, buf,
                     is_root ? same_part(all, count) : no_part(all), only(same_part(all, count), root));
    });
}

HOST_NPU_EXPORT HcclResult HcclAllGather(void* sendBuf, void* recvBuf, uint64_t sendCount, HcclDataType dataType,
                                         HcclComm comm, aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        return moved(Function::AllGather, dataType, kNoRank, sendCount, sendBuf, recvBuf, same_part(all, sendCount),
                     equal_parts(all, sendCount));
    });
}

HOST_NPU_EXPORT HcclResult HcclAllGatherV(void* sendBuf, uint64_t sendCount, void* recvBuf, const void* recvCounts,
                                          const void* recvDispls, HcclDataType dataType, HcclComm comm,
                                          aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        return moved(Function::AllGatherV, dataType, kNoRank, 0, sendBuf, recvBuf, same_part(all, sendCount),
                     parts_of(all, recvCounts, "recvCounts", recvDispls, "recvDispls"));
    });
}

HOST_NPU_EXPORT HcclResult HcclScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType,
                                       uint32_t root, HcclComm comm, aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        const bool is_root = all.rank() == root;
        return moved(Function::Scatter, dataType, root, recvCount, sendBuf, recvBuf,
                     is_root ? equal_parts(all, recvCount) : no_part(all), only(same_part(all, recvCount), root),
                     false);
    });
}

HOST_NPU_EXPORT HcclResult HcclAlltoAll(const void* sendBuf, uint64_t sendCount, HcclDataType sendType,
                                        const void* recvBuf, uint64_t recvCount, HcclDataType recvType, HcclComm comm,
                                        aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        require(sendType == recvType, "sendType and recvType must be the same");
        return moved(Function::AlltoAll, sendType, kNoRank, sendCount, sendBuf, recvBuf, equal_parts(all, sendCount),
                     equal_parts(all, recvCount), false);
    });
}

HOST_NPU_EXPORT HcclResult HcclAlltoAllV(const void* sendBuf, const void* sendCounts, const void* sdispls,
                                         HcclDataType sendType, const void* recvBuf, const void* recvCounts,
                                         const void* rdispls, HcclDataType recvType, HcclComm comm,
                                         aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        require(sendType == recvType, "sendType and recvType must be the same");
        return moved(Function::AlltoAllV, sendType, kNoRank, 0, sendBuf, recvBuf,
                     parts_of(all, sendCounts, "sendCounts", sdispls, "sdispls"),
                     parts_of(all, recvCounts, "recvCounts", rdispls, "rdispls"), false);
    });
}

HOST_NPU_EXPORT HcclResult HcclAlltoAllVC(const void* sendBuf, const void* sendCountMatrix, HcclDataType sendType,
                                          const void* recvBuf, HcclDataType recvType, HcclComm comm,
                                          aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        require(sendType == recvType, "sendType and recvType must be the same");
        require(sendCountMatrix, "sendCountMatrix");
        const auto* const matrix = static_cast<const std::uint64_t*>(sendCountMatrix);
        Parts send, receive;
        std::uint64_t sent = 0, received = 0;
        for (Rank rank = 0; rank < all.size(); ++rank) {
            send.push_back({sent, matrix[std::size_t{all.rank()} * all.size() + rank]});
            receive.push_back({received, matrix[std::size_t{rank} * all.size() + all.rank()]});
            sent += send.back().count;
            received += receive.back().count;
        }
        return moved(Function::AlltoAllVC, sendType, kNoRank, 0, sendBuf, recvBuf, std::move(send), std::move(receive),
                     false);
    });
}

HOST_NPU_EXPORT HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
    return collective(__func__, comm, stream, [&](const Communicator& all) {
        return moved(Function::Barrier, HCCL_DATA_TYPE_INT8, kNoRank, 0, nullptr, nullptr, no_part(all), no_part(all));
    });
}
