#include "hccl/exchange.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "ascendcl/error.h"
#include "hccl/reduce.h"
#include "hccl/task.h"

namespace host_npu::hccl {
namespace {

constexpr std::size_t kAlignment = 64;

// A range of the bytes of a part.
struct Slice {
    std::size_t start;
    std::size_t size;
};

// Returns the bytes of window `number`, for windows of `window` bytes.
Slice slice(std::size_t bytes, std::size_t window, std::uint64_t number) {
    const auto start = std::min<std::uint64_t>(bytes, number * window);
    return {start, std::min(window, bytes - start)};
}

// One rank's transfer of an exchange's data.
class Transfer {
  public:
    Transfer(Communicator& communicator, const Exchange& exchange)
        : communicator_(communicator), board_(communicator.board()), exchange_(exchange), rank_(communicator.rank()) {
        for (const auto& part : exchange.send) sources_.push_back(bytes_of(exchange.send_buffer, part));
        for (const auto& part : exchange.receive) targets_.push_back(bytes_of(exchange.receive_buffer, part));
        const auto share = kWindowBytes / communicator.size() / kAlignment * kAlignment;
        window_bytes_ = exchange.same_for_all ? kWindowBytes : share;
    }

    void run(const Call& call) {
        const auto before = communicator_.windows;
        board_.write_call(rank_, call);
        std::uint64_t count = 1;
        for (std::uint64_t number = 0; number < count; ++number) {
            show(before + number, number);
            wait_for_others(call, before + number + 1);
            if (number == 0) count = compare(call);
            take(before + number, number);
        }
        communicator_.windows = before + count;
    }

  private:
    struct Bytes {
        std::byte* start = nullptr;
        std::size_t size = 0;
    };

    Bytes bytes_of(const void* buffer, const Part& part) const {
        if (part.count == 0) return {};
        const auto size = item_size(exchange_.dtype);
        const auto* const start = static_cast<const std::byte*>(buffer) + part.start * size;
        return {static_cast<std::byte*>(host_alias(start, part.count * size)), part.count * size};
    }

    // The offset in a window of the bytes for `rank`.
    std::size_t offset_for(Rank rank) const { return exchange_.same_for_all ? 0 : rank * window_bytes_; }

    void show(std::uint64_t window, std::uint64_t number) {
        for (Rank rank = 0; rank < sources_.size(); ++rank) {
            const auto [start, size] = slice(sources_[rank].size, window_bytes_, number);
            if (rank == rank_ || size == 0) continue;
            std::memcpy(board_.window(rank_, window) + offset_for(rank), sources_[rank].start + start, size);
            if (exchange_.same_for_all) break;
        }
        board_.seat(rank_).windows.store(window + 1);
        for (Rank rank = 0; rank < communicator_.size(); ++rank) {
            if (rank != rank_) communicator_.ring(rank);
        }
    }

    void wait_for_others(const Call& call, std::uint64_t windows) {
        std::vector<Rank> others;
        for (Rank rank = 0; rank < communicator_.size(); ++rank) {
            if (rank != rank_) others.push_back(rank);
        }
        communicator_.await(
            {[&] { return where(communicator_, call.head); }, communicator_.execution_limit()}, std::move(others),
            [](Rank rank) { return rank; },
            [&](Rank rank) { return board_.seat(rank).windows.load() >= windows ? Step::kDone : Step::kWaits; });
    }

    // Fails unless the calls of all ranks match. Returns the number of windows that they need.
    std::uint64_t compare(const Call& call) {
        std::vector<Call> calls;
        std::uint64_t most = 0;
        for (Rank rank = 0; rank < communicator_.size(); ++rank) {
            calls.push_back(board_.read_call(rank, call.head.number));
            for (const auto count : calls.back().send_counts) most = std::max(most, count);
        }
        if (const auto text = describe_mismatch(calls)) {
            communicator_.fail(
                ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, HCCL_E_REMOTE,
                "call " + std::to_string(call.head.number) + " of communicator " + communicator_.name() + ": " + *text);
        }
        const auto bytes = most * item_size(exchange_.dtype);
        return std::max<std::uint64_t>(1, (bytes + window_bytes_ - 1) / window_bytes_);
    }

    const std::byte* shown_by(Rank rank, std::uint64_t window, std::size_t start) const {
        return rank == rank_ ? sources_[rank].start + start : board_.window(rank, window) + offset_for(rank_);
    }

    void take(std::uint64_t window, std::uint64_t number) {
        std::vector<const std::byte*> shown;
        for (Rank rank = 0; rank < targets_.size(); ++rank) {
            const auto [start, size] = slice(targets_[rank].size, window_bytes_, number);
            if (size == 0) continue;
            auto* const target = targets_[rank].start + start;
            const auto* const source = shown_by(rank, window, start);
            if (exchange_.op == HCCL_REDUCE_RESERVED) {
                if (target != source) std::memmove(target, source, size);
                continue;
            }
            shown.push_back(source);
            if (shown.size() == targets_.size()) reduce(exchange_.dtype, exchange_.op, shown, target, size);
        }
    }

    Communicator& communicator_;
    const Board& board_;
    const Exchange& exchange_;
    const Rank rank_;
    std::size_t window_bytes_;
    std::vector<Bytes> sources_;
    std::vector<Bytes> targets_;
};

Call call_of(const Exchange& exchange, std::uint64_t number) {
    Call call{{number, exchange.function, exchange.dtype, exchange.op, exchange.root, exchange.count}, {}, {}};
    for (const auto& part : exchange.send) call.send_counts.push_back(part.count);
    for (const auto& part : exchange.receive) call.receive_counts.push_back(part.count);
    return call;
}

}  // namespace

std::uint64_t Exchange::bytes_from(Rank rank) const {
    std::uint64_t elements = 0;
    for (Rank other = 0; other < send.size(); ++other) {
        if (other == rank) continue;
        elements = same_for_all ? std::max(elements, send[other].count) : elements + send[other].count;
    }
    return elements * item_size(dtype);
}

std::int32_t enqueue(const std::shared_ptr<Communicator>& communicator, Exchange exchange, void* stream) {
    if (const auto refused = refused_if_captured(stream, name_of(exchange.function))) return *refused;
    const auto number = communicator->collectives().take_number();
    const auto call = call_of(exchange, number);
    const auto status =
        enqueue_task(communicator, call.head, stream, [communicator, exchange = std::move(exchange), call] {
            auto& lane = communicator->collectives();
            const auto is_turn = [&](Rank) { return lane.is_turn_of(call.head.number) ? Step::kDone : Step::kWaits; };
            communicator->await(
                {[&] { return where(*communicator, call.head); }, std::nullopt}, {communicator->rank()},
                [](Rank rank) { return rank; }, is_turn);
            Transfer(*communicator, exchange).run(call);
            lane.finish(call.head.number);
            communicator->ring(communicator->rank());
        });
    if (status != ACL_SUCCESS) communicator->collectives().give_back(number);
    return status;
}

}  // namespace host_npu::hccl
