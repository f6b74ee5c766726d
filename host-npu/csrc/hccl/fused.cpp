#include "hccl/fused.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "hccl/collective.h"

namespace host_npu::hccl {
namespace {

std::vector<std::shared_ptr<Communicator>> of_this_process() {
    auto all = communicators().all();
    std::erase_if(all, [](const auto& communicator) { return !communicator->is_of_this_process(); });
    return all;
}

std::string names(const std::vector<std::shared_ptr<Communicator>>& all) {
    std::vector<std::string> names;
    for (const auto& communicator : all) names.push_back(communicator->name());
    std::sort(names.begin(), names.end());
    std::string text;
    for (const auto& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
    return text.empty() ? "it has none" : "it has " + text;
}

// Returns this process's communicator of that name. Throws Refusal unless exactly one rank of the process has it.
std::shared_ptr<Communicator> named(const std::string& name) {
    const auto all = of_this_process();
    auto found = all;
    std::erase_if(found, [&](const auto& communicator) { return communicator->name() != name; });
    require(!found.empty(), "group is \"" + name + "\", which is not a communicator of this process; " + names(all));
    require(found.size() == 1, "group is \"" + name + "\", which " + std::to_string(found.size()) +
                                   " ranks of this process have; the host NPU takes one rank in each process");
    return found.front();
}

Parts consecutive(const std::vector<std::uint64_t>& counts) {
    Parts parts;
    std::uint64_t start = 0;
    for (const auto count : counts) parts.push_back({std::exchange(start, start + count), count});
    return parts;
}

Exchange exchange_of(const Fused& fused, const Communicator& all, void* send_buffer, void* receive_buffer) {
    if (!fused.sent.empty()) {
        return {fused.function,
                fused.dtype,
                HCCL_REDUCE_RESERVED,
                kNoRank,
                0,
                send_buffer,
                receive_buffer,
                consecutive(fused.sent),
                consecutive(fused.received),
                false};
    }
    const bool gathers = fused.gathers();
    const bool scatters = fused.function == Function::MatmulReduceScatter;
    return {fused.function,
            fused.dtype,
            gathers ? HCCL_REDUCE_RESERVED : HCCL_REDUCE_SUM,
            kNoRank,
            fused.count,
            send_buffer,
            receive_buffer,
            scatters ? equal_parts(all, fused.count) : same_part(all, fused.count),
            gathers ? equal_parts(all, fused.count) : same_part(all, fused.count),
            !scatters};
}

}  // namespace

Named find_named(const std::string& name) {
    try {
        const auto found = named(name);
        return {found->rank(), found->size(), ""};
    } catch (const std::exception& refusal) {
        return {0, 0, refusal.what()};
    }
}

std::optional<std::string> communicate(const Fused& fused, void* send_buffer, void* receive_buffer, void* stream) {
    try {
        const auto communicator = named(fused.communicator);
        require(communicator->size() == fused.ranks, "group \"" + fused.communicator + "\" has " +
                                                         std::to_string(communicator->size()) + " ranks; it had " +
                                                         std::to_string(fused.ranks) + " in phase one");
        enqueue_collective(name_of(fused.function), communicator,
                           exchange_of(fused, *communicator, send_buffer, receive_buffer), stream);
        return std::nullopt;
    } catch (const std::exception& error) {
        return error.what();
    }
}

}  // namespace host_npu::hccl
