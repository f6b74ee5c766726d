// One rank's end of a communicator: the order of its calls, waits and failures.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ascendcl/handles.h"
#include "hccl/board.h"

namespace host_npu::hccl {

// The progress of a step of a transfer.
enum class Step { kWaits, kMoved, kDone };

// A sequence of calls that run one after another. Thread-safe.
class Lane {
  public:
    std::uint64_t take_number() { return ++issued_; }
    // Withdraws a call that was not made.
    void give_back(std::uint64_t number) { issued_.compare_exchange_strong(number, number - 1); }
    bool is_turn_of(std::uint64_t number) const { return done_.load() + 1 == number; }
    void finish(std::uint64_t number) { done_.store(number); }

  private:
    std::atomic<std::uint64_t> issued_{0};
    std::atomic<std::uint64_t> done_{0};
};

// Nullopt: no limit.
using Limit = std::optional<std::chrono::seconds>;

class Communicator {
  public:
    Communicator(Board board, Rank rank, std::string name, Limit execution_limit);
    // Tells the other ranks that this one has left.
    ~Communicator();
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    const Board& board() const { return board_; }
    Rank rank() const { return rank_; }
    std::uint32_t size() const { return board_.world_size(); }
    const std::string& name() const { return name_; }
    Limit execution_limit() const { return execution_limit_; }
    // Whether this process created it; false in a forked child.
    bool is_of_this_process() const;

    Lane& collectives() { return collectives_; }
    Lane& sends_to(Rank rank) { return sends_[rank]; }
    Lane& receives_from(Rank rank) { return receives_[rank]; }

    // A wait of this rank. `where` is used in messages, for example "in call 7, AllReduce(...)".
    struct Wait {
        std::function<std::string()> where;
        Limit limit;
    };
    // Waits until `step` has returned kDone once for each of `peers`, indices that `rank_of` maps to ranks. Throws
    // Error if the communicator has failed or fails, or if a rank has died, has left or times out.
    void await(const Wait& wait, std::vector<std::uint32_t> peers, const std::function<Rank(std::uint32_t)>& rank_of,
               const std::function<Step(std::uint32_t)>& step);

    void ring(Rank rank) const { board_.seat(rank).bell.ring(); }
    void ring_all() const;

    // Ends the communicator on all ranks, and throws the failure that was recorded first.
    [[noreturn]] void fail(std::int32_t acl_status, HcclResult result, const std::string& text);
    void record_failure(std::int32_t acl_status, HcclResult result, const std::string& text) noexcept;
    // HCCL_SUCCESS if there is no failure.
    HcclResult failure() const;
    // Returns the message of the failure, once.
    std::optional<std::string> untold_failure();
    void throw_if_failed() const;

    // Interrupts waits.
    void leave();

    // Publishes the rank's current call for the error messages of other ranks.
    void set_activity(const CallHead& head);

    // The number of windows that each rank has written before the current collective.
    std::uint64_t windows = 0;

  private:
    void throw_if_ended() const;
    // Describes how another rank ended; nullopt if it is alive.
    std::optional<std::string> end_of(Rank rank) const;
    // Returns the end of an error message.
    std::string last_call_of(Rank rank) const;
    [[noreturn]] void report_missing(const Wait& wait, Rank missing, const std::string& what, HcclResult result);

    const Board board_;
    const Rank rank_;
    const std::string name_;
    const Limit execution_limit_;
    const int owner_;
    // Several stream threads may publish an activity.
    std::mutex activity_mutex_;
    std::atomic<bool> has_left_{false};
    std::atomic<bool> is_told_{false};
    Lane collectives_;
    std::vector<Lane> sends_;
    std::vector<Lane> receives_;
};

Handles<Communicator>& communicators();

}  // namespace host_npu::hccl
