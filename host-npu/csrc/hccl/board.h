// The shared memory of a communicator: the state of its ranks, and buffers for their data.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "hccl/call.h"
#include "hccl/process.h"
#include "hccl/shared_memory.h"

namespace host_npu::hccl {

// The size of a rank's window, through which it publishes its data in collectives.
inline constexpr std::size_t kWindowBytes = std::size_t{1} << 20;
// The size of a piece of a message.
inline constexpr std::size_t kPieceBytes = std::size_t{1} << 18;
// Windows and pieces are double-buffered.
inline constexpr std::size_t kBuffers = 2;

inline constexpr std::uint32_t kMostRanks = 1024;

// A condition variable shared by threads of several processes.
class Bell {
  public:
    std::uint32_t rings() const { return rings_.load(); }
    void ring();
    // Returns when the number of rings exceeds `rings`, or after the time-out.
    void wait(std::uint32_t rings, std::chrono::milliseconds time);

  private:
    std::atomic<std::uint32_t> rings_;
    std::atomic<std::uint32_t> sleepers_;
};

// The failure that ended a communicator.
struct Failure {
    enum State : std::uint32_t { kNone, kWriting, kWritten };
    std::atomic<std::uint32_t> state;
    std::int32_t acl_status;
    HcclResult result;
    std::array<char, 1000> text;
};

struct alignas(64) Header {
    std::uint64_t token;
    // 0 until the first rank has joined.
    std::atomic<std::uint32_t> world_size;
    Failure failure;
};

// A sub-communicator's shared memory, which a rank offers to others.
struct Offer {
    enum State : std::uint32_t { kFree, kTaken, kOpen };
    std::atomic<std::uint32_t> state;
    int descriptor;
    std::uint64_t sub_communicator;
    std::uint64_t token;
};

inline constexpr std::size_t kOffers = 4;

// The state of a rank.
struct alignas(64) Seat {
    enum State : std::uint32_t { kEmpty, kClaimed, kTaken, kLeft };
    Bell bell;
    std::atomic<std::uint32_t> state;
    Process process;
    // The number of windows that the rank has written in all collectives.
    alignas(64) std::atomic<std::uint64_t> windows;
    // The rank's current or last call, for error messages.
    CallHead activity;
    std::array<Offer, kOffers> offers;
};

// The messages from one rank to another.
struct alignas(64) Channel {
    struct Side {
        // The numbers of calls started and of pieces written or read.
        std::atomic<std::uint64_t> calls;
        std::atomic<std::uint64_t> pieces;
        std::array<CallHead, kBuffers> heads;
    };
    Side sender;
    Side receiver;
};

// A rank's mapping of the shared memory.
class Board {
  public:
    Board(const File& file, std::uint32_t world_size);

    static std::size_t bytes(std::uint32_t world_size);

    std::uint32_t world_size() const { return world_size_; }
    Header& header() const { return at<Header>(0); }
    Seat& seat(Rank rank) const;
    Channel& channel(Rank from, Rank to) const;

    // The call of a rank, double-buffered by call number.
    void write_call(Rank rank, const Call& call) const;
    Call read_call(Rank rank, std::uint64_t number) const;

    std::byte* window(Rank rank, std::uint64_t number) const;
    std::byte* piece(Rank from, Rank to, std::uint64_t number) const;

  private:
    struct Offsets {
        std::size_t seats, channels, calls, windows, pieces, end;
    };
    static Offsets offsets(std::uint32_t world_size);

    template <class Object>
    Object& at(std::size_t offset) const {
        return *reinterpret_cast<Object*>(mapping_.start() + offset);
    }
    std::size_t call_offset(Rank rank, std::uint64_t number) const;

    std::uint32_t world_size_;
    Offsets offsets_;
    Mapping mapping_;
};

}  // namespace host_npu::hccl
