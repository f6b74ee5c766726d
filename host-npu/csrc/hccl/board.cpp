#include "hccl/board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <ctime>

namespace host_npu::hccl {
namespace {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);

constexpr std::size_t kPage = 4096;

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::size_t call_bytes(std::uint32_t world_size) {
    return (sizeof(CallHead) + 2 * sizeof(std::uint64_t) * world_size + 63) / 64 * 64;
}

}  // namespace

void Bell::ring() {
    rings_.fetch_add(1);
    if (sleepers_.load() > 0) syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::wait(std::uint32_t rings, std::chrono::milliseconds time) {
    sleepers_.fetch_add(1);
    const timespec limit{static_cast<std::time_t>(time.count() / 1000),
                         static_cast<long>(time.count() % 1000 * 1000000)};
    syscall(SYS_futex, &rings_, FUTEX_WAIT, rings, &limit, nullptr, 0);
    sleepers_.fetch_sub(1);
}

Board::Offsets Board::offsets(std::uint32_t world_size) {
    const std::size_t pairs = std::size_t{world_size} * world_size;
    Offsets result{};
    result.seats = whole_pages(sizeof(Header));
    result.channels = result.seats + world_size * sizeof(Seat);
    result.calls = result.channels + pairs * sizeof(Channel);
    result.windows = whole_pages(result.calls + world_size * kBuffers * call_bytes(world_size));
    result.pieces = result.windows + world_size * kBuffers * kWindowBytes;
    result.end = result.pieces + pairs * kBuffers * kPieceBytes;
    return result;
}

std::size_t Board::bytes(std::uint32_t world_size) { return offsets(world_size).end; }

Board::Board(const File& file, std::uint32_t world_size)
    : world_size_(world_size), offsets_(offsets(world_size)), mapping_(file, offsets_.end) {}

Seat& Board::seat(Rank rank) const { return at<Seat>(offsets_.seats + rank * sizeof(Seat)); }

Channel& Board::channel(Rank from, Rank to) const {
    return at<Channel>(offsets_.channels + (std::size_t{from} * world_size_ + to) * sizeof(Channel));
}

std::size_t Board::call_offset(Rank rank, std::uint64_t number) const {
    return offsets_.calls + (rank * kBuffers + number % kBuffers) * call_bytes(world_size_);
}

void Board::write_call(Rank rank, const Call& call) const {
    const auto offset = call_offset(rank, call.head.number);
    at<CallHead>(offset) = call.head;
    auto* const counts = &at<std::uint64_t>(offset + sizeof(CallHead));
    std::memcpy(counts, call.send_counts.data(), world_size_ * sizeof(std::uint64_t));
    std::memcpy(counts + world_size_, call.receive_counts.data(), world_size_ * sizeof(std::uint64_t));
}

Call Board::read_call(Rank rank, std::uint64_t number) const {
    const auto offset = call_offset(rank, number);
    const auto* const counts = &at<std::uint64_t>(offset + sizeof(CallHead));
    return {at<CallHead>(offset),
            {counts, counts + world_size_},
            {counts + world_size_, counts + std::size_t{2} * world_size_}};
}

std::byte* Board::window(Rank rank, std::uint64_t number) const {
    return &at<std::byte>(offsets_.windows + (rank * kBuffers + number % kBuffers) * kWindowBytes);
}

std::byte* Board::piece(Rank from, Rank to, std::uint64_t number) const {
    const auto pair = std::size_t{from} * world_size_ + to;
    return &at<std::byte>(offsets_.pieces + (pair * kBuffers + number % kBuffers) * kPieceBytes);
}

}  // namespace host_npu::hccl
