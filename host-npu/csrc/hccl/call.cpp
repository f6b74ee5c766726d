#include "hccl/call.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <sstream>
#include <string_view>

namespace host_npu::hccl {
namespace {

bool has_counts_of_each_rank(Function function) {
    return function == Function::ReduceScatterV || function == Function::AllGatherV ||
           function == Function::AlltoAllV || function == Function::AlltoAllVC ||
           function == Function::AlltoAllvGroupedMatMul || function == Function::GroupedMatMulAlltoAllv;
}

std::string list(const std::vector<std::uint64_t>& counts) {
    std::ostringstream text;
    const char* separator = "[";
    for (const auto count : counts) {
        text << separator << count;
        separator = ", ";
    }
    text << ']';
    return text.str();
}

std::string short_name(Function function) {
    const std::string name = name_of(function);
    return name.substr(std::string_view(name.starts_with("Hccl") ? "Hccl" : "aclnn").size());
}

std::string arguments(const CallHead& head) {
    std::string text = ", " + host_npu::hccl::name_of(head.dtype);
    if (head.op != HCCL_REDUCE_RESERVED) text += ", " + host_npu::hccl::name_of(head.op);
    if (head.peer == kNoRank) return text;
    const auto peer = std::to_string(head.peer);
    if (head.function == Function::Send) return text + ", to rank " + peer;
    if (head.function == Function::Recv) return text + ", from rank " + peer;
    return text + ", root=" + peer;
}

// Whether arguments that must be equal on all ranks are equal.
bool agree(const CallHead& first, const CallHead& second) {
    return first.function == second.function && first.dtype == second.dtype && first.op == second.op &&
           first.peer == second.peer && first.count == second.count;
}

// In the order of Function.
constexpr std::array kFunctions{"HcclAllReduce",
                                "HcclReduce",
                                "HcclReduceScatter",
                                "HcclReduceScatterV",
                                "HcclBroadcast",
                                "HcclAllGather",
                                "HcclAllGatherV",
                                "HcclScatter",
                                "HcclAlltoAll",
                                "HcclAlltoAllV",
                                "HcclAlltoAllVC",
                                "HcclBarrier",
                                "HcclSend",
                                "HcclRecv",
                                "HcclBatchSendRecv",
                                "aclnnMatmulAllReduce",
                                "aclnnAllGatherMatmul",
                                "aclnnMatmulReduceScatter",
                                "aclnnMoeDistributeDispatch",
                                "aclnnMoeDistributeCombine",
                                "aclnnAlltoAllvGroupedMatMul",
                                "aclnnGroupedMatMulAlltoAllv"};
static_assert(kFunctions.size() == static_cast<std::size_t>(Function::GroupedMatMulAlltoAllv) + 1);

struct DataType {
    HcclDataType dtype;
    const char* name;
    std::size_t size;
};

constexpr DataType kDataTypes[] = {
    {HCCL_DATA_TYPE_INT8, "int8", 1},       {HCCL_DATA_TYPE_INT16, "int16", 2},
    {HCCL_DATA_TYPE_INT32, "int32", 4},     {HCCL_DATA_TYPE_INT64, "int64", 8},
    {HCCL_DATA_TYPE_INT128, "int128", 16},  {HCCL_DATA_TYPE_UINT8, "uint8", 1},
    {HCCL_DATA_TYPE_UINT16, "uint16", 2},   {HCCL_DATA_TYPE_UINT32, "uint32", 4},
    {HCCL_DATA_TYPE_UINT64, "uint64", 8},   {HCCL_DATA_TYPE_FP16, "fp16", 2},
    {HCCL_DATA_TYPE_FP32, "fp32", 4},       {HCCL_DATA_TYPE_FP64, "fp64", 8},
    {HCCL_DATA_TYPE_BFP16, "bf16", 2},      {HCCL_DATA_TYPE_HIF8, "hif8", 1},
    {HCCL_DATA_TYPE_FP8E4M3, "fp8e4m3", 1}, {HCCL_DATA_TYPE_FP8E5M2, "fp8e5m2", 1},
    {HCCL_DATA_TYPE_FP8E8M0, "fp8e8m0", 1},
};

// Returns null for an unknown type.
const DataType* find(HcclDataType dtype) {
    const auto* const found = std::ranges::find(kDataTypes, dtype, &DataType::dtype);
    return found == std::end(kDataTypes) ? nullptr : found;
}

std::string called(Rank rank, const std::string& call) { return "rank " + std::to_string(rank) + " called " + call; }

}  // namespace

const char* name_of(Function function) { return kFunctions[static_cast<std::size_t>(function)]; }

std::string name_of(HcclDataType dtype) {
    const auto* const found = find(dtype);
    return found == nullptr ? "data type " + std::to_string(dtype) : found->name;
}

std::string name_of(HcclReduceOp op) {
    static constexpr std::array names{"sum", "prod", "max", "min"};
    return static_cast<std::size_t>(op) < names.size() ? names[op] : "reduction " + std::to_string(op);
}

std::size_t item_size(HcclDataType dtype) {
    const auto* const found = find(dtype);
    return found == nullptr ? 0 : found->size;
}

std::string describe(const CallHead& head) {
    const auto name = short_name(head.function);
    if (head.function == Function::Barrier) return name + "()";
    if (head.function == Function::BatchSendRecv) return name + "(" + std::to_string(head.count) + " items)";
    return name + "(count=" + std::to_string(head.count) + arguments(head) + ")";
}

std::string describe(const Call& call) {
    if (!has_counts_of_each_rank(call.head.function)) return describe(call.head);
    return short_name(call.head.function) + "(send_counts=" + list(call.send_counts) +
           ", receive_counts=" + list(call.receive_counts) + arguments(call.head) + ")";
}

std::optional<std::string> describe_mismatch(const std::vector<Call>& calls) {
    for (Rank rank = 1; rank < calls.size(); ++rank) {
        if (!agree(calls[0].head, calls[rank].head)) {
            return called(rank, describe(calls[rank])) + " where " + called(0, describe(calls[0]));
        }
    }
    for (Rank sender = 0; sender < calls.size(); ++sender) {
        for (Rank receiver = 0; receiver < calls.size(); ++receiver) {
            const auto sent = calls[sender].send_counts[receiver];
            const auto expected = calls[receiver].receive_counts[sender];
            if (sent == expected) continue;
            return called(sender, describe(calls[sender])) + ", which sends " + std::to_string(sent) +
                   " elements to rank " + std::to_string(receiver) + ", where " +
                   called(receiver, describe(calls[receiver])) + ", which expects " + std::to_string(expected);
        }
    }
    return std::nullopt;
}

std::optional<std::string> describe_mismatch(Rank from, const CallHead& send, Rank to, const CallHead& receive) {
    if (send.dtype == receive.dtype && send.count == receive.count) return std::nullopt;
    return called(to, describe(receive)) + " where " + called(from, describe(send));
}

}  // namespace host_npu::hccl
