// The arguments of a call, and whether the calls of several ranks match.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hccl/hccl_types.h"

namespace host_npu::hccl {

using Rank = std::uint32_t;

enum class Function : std::uint32_t {
    AllReduce,
    Reduce,
    ReduceScatter,
    ReduceScatterV,
    Broadcast,
    AllGather,
    AllGatherV,
    Scatter,
    AlltoAll,
    AlltoAllV,
    AlltoAllVC,
    Barrier,
    Send,
    Recv,
    BatchSendRecv,
    // Operators that compute and communicate at once.
    MatmulAllReduce,
    AllGatherMatmul,
    MatmulReduceScatter,
    MoeDistributeDispatch,
    MoeDistributeCombine,
    AlltoAllvGroupedMatMul,
    GroupedMatMulAlltoAllv,
};

// The published name, for instance "HcclAllReduce".
const char* name_of(Function function);

// The names used in messages, for instance "fp32" and "sum".
std::string name_of(HcclDataType dtype);
std::string name_of(HcclReduceOp op);

// The size of an element in bytes; 0 for an unknown type.
std::size_t item_size(HcclDataType dtype);

// The part of a call whose size does not depend on the number of ranks.
struct CallHead {
    // Counts the collectives of a communicator, or the messages from one rank to another, from 1.
    std::uint64_t number;
    Function function;
    HcclDataType dtype;
    // HCCL_REDUCE_RESERVED without a reduction.
    HcclReduceOp op;
    // The root, the peer of a message, or kNoRank.
    Rank peer;
    // The argument `count` of its function, or the number of items of a batch.
    std::uint64_t count;
};

inline constexpr Rank kNoRank = ~Rank{0};

// A call, with the number of elements sent to and received from each rank.
struct Call {
    CallHead head;
    std::vector<std::uint64_t> send_counts;
    std::vector<std::uint64_t> receive_counts;
};

// For instance "AllReduce(count=8, fp32, sum)".
std::string describe(const CallHead& head);
std::string describe(const Call& call);

// Describes the mismatch of the calls of all ranks (at least one); nullopt if they match.
std::optional<std::string> describe_mismatch(const std::vector<Call>& calls);

// The same for a message from rank `from` to rank `to`.
std::optional<std::string> describe_mismatch(Rank from, const CallHead& send, Rank to, const CallHead& receive);

}  // namespace host_npu::hccl
