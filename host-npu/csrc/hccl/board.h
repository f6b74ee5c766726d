// The shared memory of a communicator: what its ranks tell each other, and the room through which data goes.
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

// How much of its data a rank shows the others at a time.
inline constexpr std::size_t kWindowBytes = std::size_t{1} << 20;
// How much of a message is on its way at a time.
inline constexpr std::size_t kPieceBytes = std::size_t{1} << 18;
// Both twice, so that one can be written while another is read.
inline constexpr std::size_t kBuffers = 2;

inline constexpr std::uint32_t kMostRanks = 1024;

// Lets threads of several processes wait for a change.
class Bell {
  public:
    std::uint32_t rings() const { return rings_.load(); }
    void ring();
    // Returns once there were more rings than `rings`, or after the time.
    void wait(std::uint32_t rings, std::chrono::milliseconds time);

  private:
    std::atomic<std::uint32_t> rings_;
    std::atomic<std::uint32_t> sleepers_;
};

// What ended a communicator.
struct Failure {
    enum State : std::uint32_t { kNone, kWriting, kWritten };
    std::atomic<std::uint32_t> state;
    std::int32_t acl_status;
    HcclResult result;
    std::array<char, 1000> text;
};

struct alignas(64) Header {
    std::uint64_t token;
    // 0 until the first rank has come.
    std::atomic<std::uint32_t> world_size;
    Failure failure;
};

// Shared memory of a sub-communicator that a rank offers to others.
struct Offer {
    enum State : std::uint32_t { kFree, kTaken, kOpen };
    std::atomic<std::uint32_t> state;
    int descriptor;
    std::uint64_t sub_communicator;
    std::uint64_t token;
};

inline constexpr std::size_t kOffers = 4;

// Where a rank sits.
struct alignas(64) Seat {
    enum State : std::uint32_t { kEmpty, kClaimed, kTaken, kLeft };
    Bell bell;
    std::atomic<std::uint32_t> state;
    Process process;
    // Of the windows that the rank has shown, in all collectives so far.
    alignas(64) std::atomic<std::uint64_t> windows;
    // What the rank does or did last, for messages.
    CallHead activity;
    std::array<Offer, kOffers> offers;
};

// What goes from one rank to another.
struct alignas(64) Channel {
    struct Side {
        // Calls begun, and pieces written or read.
        std::atomic<std::uint64_t> calls;
        std::atomic<std::uint64_t> pieces;
        std::array<CallHead, kBuffers> heads;
    };
    Side sender;
    Side receiver;
};

// A rank's view of all this.
class Board {
  public:
    Board(const File& file, std::uint32_t world_size);

    static std::size_t bytes(std::uint32_t world_size);

    std::uint32_t world_size() const { return world_size_; }
    Header& header() const { return at<Header>(0); }
    Seat& seat(Rank rank) const;
    Channel& channel(Rank from, Rank to) const;

    // The calls of a rank with an even and with an odd number.
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
