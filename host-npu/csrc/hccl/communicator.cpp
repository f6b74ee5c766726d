#include "hccl/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "ascendcl/error.h"

namespace host_npu::hccl {
namespace {

using Clock = std::chrono::steady_clock;

// The interval at which a sleeping rank checks whether the others are alive.
constexpr std::chrono::milliseconds kNap{100};
// The number of polls before a rank sleeps: few, because the ranks share the cores of one machine.
constexpr int kLooks = 200;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

std::string text_of(const Failure& failure) { return failure.text.data(); }

std::string name_of(Rank rank, const Seat& seat) {
    const auto name = "rank " + std::to_string(rank);
    if (seat.state.load() < Seat::kTaken) return name;
    return name + " (process " + std::to_string(seat.process.id) + ")";
}

}  // namespace

Communicator::Communicator(Board board, Rank rank, std::string name, Limit execution_limit)
    : board_(std::move(board)),
      rank_(rank),
      name_(std::move(name)),
      execution_limit_(execution_limit),
      owner_(getpid()),
      sends_(board_.world_size()),
      receives_(board_.world_size()) {}

Communicator::~Communicator() {
    if (is_of_this_process()) leave();
}

void Communicator::ring_all() const {
    for (Rank rank = 0; rank < size(); ++rank) ring(rank);
}

void Communicator::leave() {
    has_left_ = true;
    board_.seat(rank_).state = Seat::kLeft;
    ring_all();
}

HcclResult Communicator::failure() const {
    const auto& failure = board_.header().failure;
    return failure.state.load() == Failure::kWritten ? failure.result : HCCL_SUCCESS;
}

std::optional<std::string> Communicator::untold_failure() {
    if (failure() == HCCL_SUCCESS || is_told_.exchange(true)) return std::nullopt;
    return text_of(board_.header().failure);
}

void Communicator::throw_if_failed() const {
    const auto& failure = board_.header().failure;
    if (failure.state.load() == Failure::kWritten) throw Error(failure.acl_status, text_of(failure));
}

void Communicator::throw_if_ended() const {
    throw_if_failed();
    if (has_left_) throw Error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "the communicator " + name_ + " was destroyed");
}

void Communicator::record_failure(std::int32_t acl_status, HcclResult result, const std::string& text) noexcept {
    auto& failure = board_.header().failure;
    std::uint32_t expected = Failure::kNone;
    if (!failure.state.compare_exchange_strong(expected, Failure::kWriting)) return;
    failure.acl_status = acl_status;
    failure.result = result;
    const auto length = std::min(text.size(), failure.text.size() - 1);
    std::memcpy(failure.text.data(), text.data(), length);
    failure.text[length] = '\0';
    failure.state = Failure::kWritten;
    ring_all();
}

void Communicator::fail(std::int32_t acl_status, HcclResult result, const std::string& text) {
    record_failure(acl_status, result, text);
    throw_if_failed();
    throw Error(acl_status, text);
}

std::string Communicator::last_call_of(Rank rank) const {
    const auto& seat = board_.seat(rank);
    if (seat.state.load() < Seat::kTaken) return "";
    const auto name = "rank " + std::to_string(rank);
    const auto& last = seat.activity;
    if (last.number == 0) return "; " + name + " has made no call";
    return "; " + name + " was last in call " + std::to_string(last.number) + ", " + describe(last);
}

void Communicator::report_missing(const Wait& wait, Rank missing, const std::string& what, HcclResult result) {
    fail(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, result,
         name_of(missing, board_.seat(missing)) + " " + what + ": rank " + std::to_string(rank_) + " waited for it " +
             wait.where() + last_call_of(missing));
}

std::optional<std::string> Communicator::end_of(Rank rank) const {
    const auto& seat = board_.seat(rank);
    const auto state = seat.state.load();
    if (rank == rank_ || state < Seat::kTaken) return std::nullopt;
    if (state == Seat::kLeft) return "has destroyed the communicator";
    if (!is_alive(seat.process)) return "died";
    return std::nullopt;
}

void Communicator::await(const Wait& wait, std::vector<std::uint32_t> peers,
                         const std::function<Rank(std::uint32_t)>& rank_of,
                         const std::function<Step(std::uint32_t)>& step) {
    auto& bell = board_.seat(rank_).bell;
    auto since = Clock::now();
    auto looked_at_others = since;
    // A rank that has ended, and how. It may have completed its part first.
    std::optional<std::pair<Rank, std::string>> gone;
    for (int looks = 0;;) {
        const auto rings = bell.rings();
        bool moved = false;
        std::erase_if(peers, [&](std::uint32_t peer) {
            const auto result = step(peer);
            moved = moved || result != Step::kWaits;
            return result == Step::kDone;
        });
        if (peers.empty()) return;
        if (moved) {
            since = Clock::now();
            looks = 0;
            continue;
        }
        throw_if_ended();
        if (gone) report_missing(wait, gone->first, gone->second, HCCL_E_REMOTE);
        if (looks++ < kLooks) {
            pause();
            continue;
        }
        bell.wait(rings, kNap);
        const auto now = Clock::now();
        if (now - looked_at_others < kNap) continue;
        looked_at_others = now;
        for (const auto peer : peers) {
            const auto rank = rank_of(peer);
            const auto how = end_of(rank);
            if (!how) continue;
            gone.emplace(rank, *how);
            break;
        }
        if (!gone && wait.limit && now - since > *wait.limit) {
            report_missing(wait, rank_of(peers.front()),
                           "did not come within " + std::to_string(wait.limit->count()) + " s", HCCL_E_TIMEOUT);
        }
    }
}

void Communicator::set_activity(const CallHead& head) {
    const std::lock_guard lock(activity_mutex_);
    board_.seat(rank_).activity = head;
}

bool Communicator::is_of_this_process() const { return owner_ == getpid(); }

Handles<Communicator>& communicators() {
    static auto& all = *new Handles<Communicator>("HcclComm");
    return all;
}

}  // namespace host_npu::hccl
