// One rank's end of a communicator: its turns, its waits, and how it ends.
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

// How far a step of a transfer came.
enum class Step { kWaits, kMoved, kDone };

// Calls that have to be done one after the other. Thread-safe.
class Lane {
  public:
    std::uint64_t take_number() { return ++issued_; }
    // For a call that was not made after all.
    void give_back(std::uint64_t number) { issued_.compare_exchange_strong(number, number - 1); }
    bool is_turn_of(std::uint64_t number) const { return done_.load() + 1 == number; }
    void finish(std::uint64_t number) { done_.store(number); }

  private:
    std::atomic<std::uint64_t> issued_{0};
    std::atomic<std::uint64_t> done_{0};
};

// No time is no limit.
using Limit = std::optional<std::chrono::seconds>;

class Communicator {
  public:
    Communicator(Board board, Rank rank, std::string name, Limit execution_limit);
    // The others are told that this rank has left.
    ~Communicator();
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    const Board& board() const { return board_; }
    Rank rank() const { return rank_; }
    std::uint32_t size() const { return board_.world_size(); }
    const std::string& name() const { return name_; }
    Limit execution_limit() const { return execution_limit_; }
    // Whether this process made it: a forked child has only the object.
    bool is_of_this_process() const;

    Lane& collectives() { return collectives_; }
    Lane& sends_to(Rank rank) { return sends_[rank]; }
    Lane& receives_from(Rank rank) { return receives_[rank]; }

    // A wait of this rank, as messages name it, for instance "in call 7, AllReduce(...)".
    struct Wait {
        std::function<std::string()> where;
        Limit limit;
    };
    // Waits until `step` has returned kDone once for each of `peers`, which are what it waits for: indices of anything
    // that `rank_of` gives the rank of. Throws Error if the communicator has failed or ends, if a rank has died, left,
    // or lets it wait for too long.
    void await(const Wait& wait, std::vector<std::uint32_t> peers, const std::function<Rank(std::uint32_t)>& rank_of,
               const std::function<Step(std::uint32_t)>& step);

    void ring(Rank rank) const { board_.seat(rank).bell.ring(); }
    void ring_all() const;

    // Ends the communicator on all ranks, unless another failure did so before, and throws what ended it.
    [[noreturn]] void fail(std::int32_t acl_status, HcclResult result, const std::string& text);
    void record_failure(std::int32_t acl_status, HcclResult result, const std::string& text) noexcept;
    // HCCL_SUCCESS if nothing has ended it.
    HcclResult failure() const;
    // Why it has failed, when it is asked for the first time.
    std::optional<std::string> untold_failure();
    void throw_if_failed() const;

    // Ends what waits.
    void leave();

    // What the rank does from now on, for the messages of others.
    void set_activity(const CallHead& head);

    // Windows that all ranks have shown, before the collective whose turn it is.
    std::uint64_t windows = 0;

  private:
    void throw_if_ended() const;
    // What became of another rank that will do nothing more.
    std::optional<std::string> end_of(Rank rank) const;
    // The end of a sentence.
    std::string last_call_of(Rank rank) const;
    [[noreturn]] void report_missing(const Wait& wait, Rank missing, const std::string& what, HcclResult result);

    const Board board_;
    const Rank rank_;
    const std::string name_;
    const Limit execution_limit_;
    const int owner_;
    // Streams write what the rank does.
    std::mutex activity_mutex_;
    std::atomic<bool> has_left_{false};
    std::atomic<bool> is_told_{false};
    Lane collectives_;
    std::vector<Lane> sends_;
    std::vector<Lane> receives_;
};

Handles<Communicator>& communicators();

}  // namespace host_npu::hccl
