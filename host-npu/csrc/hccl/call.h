// The arguments of a call, and the comparison of the calls of several ranks.
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
    // Operators that compute and communicate.
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

// The names in error messages, such as "fp32" and "sum".
std::string name_of(HcclDataType dtype);
std::string name_of(HcclReduceOp op);

// The size of an element in bytes; 0 for an unknown type.
std::size_t item_size(HcclDataType dtype);

// The fixed-size part of a call.
struct CallHead {
    // The number of the collective in its communicator, or of the message from one rank to another, from 1.
    std::uint64_t number;
    Function function;
    HcclDataType dtype;
    // HCCL_REDUCE_RESERVED if there is no reduction.
    HcclReduceOp op;
    // The root, the peer of a message, or kNoRank.
    Rank peer;
    // The argument `count` of the function, or the number of items of a batch.
    std::uint64_t count;
};

inline constexpr Rank kNoRank = ~Rank{0};

// A call, with the number of elements sent to and received from each rank.
struct Call {
    CallHead head;
    std::vector<std::uint64_t> send_counts;
    std::vector<std::uint64_t> receive_counts;
};

// Formats a call, for example "AllReduce(count=8, fp32, sum)".
std::string describe(const CallHead& head);
std::string describe(const Call& call);

// Describes a mismatch between the calls of all ranks (at least one); nullopt if they match.
std::optional<std::string> describe_mismatch(const std::vector<Call>& calls);

// The same for a message from rank `from` to rank `to`.
std::optional<std::string> describe_mismatch(Rank from, const CallHead& send, Rank to, const CallHead& receive);

}  // namespace host_npu::hccl
