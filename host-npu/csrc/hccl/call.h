// What a rank asks of the others in one call, and whether several ranks ask for the same.
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
};

// The published name, for instance "HcclAllReduce".
const char* name_of(Function function);

// How messages name them, for instance "fp32" and "sum".
std::string name_of(HcclDataType dtype);
std::string name_of(HcclReduceOp op);

// Bytes of an element; 0 if there is no such type.
std::size_t item_size(HcclDataType dtype);

// The part of a call that has the same size for every number of ranks.
struct CallHead {
    // Counted from 1: of the collectives of a communicator, or of the messages from one rank to another.
    std::uint64_t number;
    Function function;
    HcclDataType dtype;
    // HCCL_REDUCE_RESERVED if nothing is reduced.
    HcclReduceOp op;
    // The root, the other side of a message, or kNoRank.
    Rank peer;
    // Elements of the argument `count` of its function; items of a batch.
    std::uint64_t count;
};

inline constexpr Rank kNoRank = ~Rank{0};

// A call, with the elements that go to each rank and come from each.
struct Call {
    CallHead head;
    std::vector<std::uint64_t> send_counts;
    std::vector<std::uint64_t> receive_counts;
};

// For instance "AllReduce(count=8, fp32, sum)".
std::string describe(const CallHead& head);
std::string describe(const Call& call);

// Why the calls of all ranks, which is at least one, do not fit together; nothing if they do.
std::optional<std::string> difference(const std::vector<Call>& calls);

// The same for a message from rank `from` to rank `to`.
std::optional<std::string> difference(Rank from, const CallHead& send, Rank to, const CallHead& receive);

}  // namespace host_npu::hccl
