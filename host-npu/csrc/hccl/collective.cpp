#include "hccl/collective.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ascendcl/device.h"
#include "hccl/reduce.h"

namespace host_npu::hccl {
namespace {

void check_buffer(const void* buffer, const Parts& parts, const char* name) {
    const bool is_used = std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.count > 0; });
    if (is_used) require(buffer, name);
    for (const auto& part : parts) {
        require(part.count <= kMostElements && part.start <= kMostElements,
                std::string(name) + " has parts of more than " + std::to_string(kMostElements) + " elements");
    }
}

bool reduces(Function function) {
    static constexpr Function all[] = {Function::AllReduce,       Function::Reduce,
                                       Function::ReduceScatter,   Function::ReduceScatterV,
                                       Function::MatmulAllReduce, Function::MatmulReduceScatter};
    return std::ranges::find(all, function) != std::end(all);
}

void check(const Communicator& communicator, const Exchange& exchange) {
    require(item_size(exchange.dtype) > 0, "there is no " + name_of(exchange.dtype), HCCL_E_NOT_SUPPORT);
    if (reduces(exchange.function)) {
        require(exchange.op >= HCCL_REDUCE_SUM && exchange.op <= HCCL_REDUCE_MIN, "there is no " + name_of(exchange.op),
                HCCL_E_NOT_SUPPORT);
        require(can_reduce(exchange.dtype, exchange.op),
                "this chip has no " + name_of(exchange.op) + " of " + name_of(exchange.dtype) + " between ranks",
                HCCL_E_NOT_SUPPORT);
    }
    if (exchange.root != kNoRank) {
        require(exchange.root < communicator.size(),
                "root must be below " + std::to_string(communicator.size()) + ", got " + std::to_string(exchange.root));
    }
    check_buffer(exchange.send_buffer, exchange.send, "sendBuf");
    check_buffer(exchange.receive_buffer, exchange.receive, "recvBuf");
}

}  // namespace

void enqueue_collective(const char* function, const std::shared_ptr<Communicator>& communicator, Exchange exchange,
                        void* stream) {
    check(*communicator, exchange);
    require_intact(*communicator);
    const auto bytes = exchange.bytes_from(communicator->rank());
    const auto status = enqueue(communicator, std::move(exchange), stream);
    require(status == ACL_SUCCESS, "the stream took no work", HCCL_E_RUNTIME);
    count_collective(function, static_cast<std::int64_t>(bytes));
}

}  // namespace host_npu::hccl
