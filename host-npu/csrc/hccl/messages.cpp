#include "hccl/messages.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "ascendcl/error.h"
#include "hccl/task.h"

namespace host_npu::hccl {
namespace {

Lane& lane_of(Communicator& communicator, const Message& message) {
    return message.is_send ? communicator.sends_to(message.peer) : communicator.receives_from(message.peer);
}

// One side of a message in transfer.
class Side {
  public:
    Side(Communicator& communicator, const Message& message, std::uint64_t number)
        : communicator_(communicator),
          message_(message),
          head_(head(message, number)),
          lane_(lane_of(communicator, message)),
          from_(message.is_send ? communicator.rank() : message.peer),
          to_(message.is_send ? message.peer : communicator.rank()),
          own_(message.is_send ? channel().sender : channel().receiver),
          other_(message.is_send ? channel().receiver : channel().sender),
          size_(message.count * item_size(message.dtype)) {
        if (size_ > 0) data_ = static_cast<std::byte*>(host_alias(message.buffer, size_));
    }

    static CallHead head(const Message& message, std::uint64_t number) {
        return {number,        message.is_send ? Function::Send : Function::Recv,
                message.dtype, HCCL_REDUCE_RESERVED,
                message.peer,  message.count};
    }

    const CallHead& head() const { return head_; }

    Step step() {
        if (!has_begun_) {
            if (!lane_.is_turn_of(head_.number)) return Step::kWaits;
            begin();
        }
        if (!has_met_) {
            if (other_.calls.load() < head_.number) return Step::kWaits;
            compare();
        }
        if (moved_ < size_) return move() ? Step::kMoved : Step::kWaits;
        lane_.finish(head_.number);
        communicator_.ring(communicator_.rank());
        return Step::kDone;
    }

  private:
    Channel& channel() const { return communicator_.board().channel(from_, to_); }

    void begin() {
        has_begun_ = true;
        own_.heads[head_.number % kBuffers] = head_;
        own_.calls.store(head_.number);
        communicator_.ring(message_.peer);
    }

    void compare() {
        has_met_ = true;
        const auto& theirs = other_.heads[head_.number % kBuffers];
        const auto& send = message_.is_send ? head_ : theirs;
        const auto& receive = message_.is_send ? theirs : head_;
        if (const auto text = describe_mismatch(from_, send, to_, receive)) {
            communicator_.fail(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, HCCL_E_REMOTE,
                               "message " + std::to_string(head_.number) + " from rank " + std::to_string(from_) +
                                   " to rank " + std::to_string(to_) + " of communicator " + communicator_.name() +
                                   ": " + *text);
        }
    }

    // Writes or reads the next piece. Returns false if all buffers are full or empty, respectively.
    bool move() {
        const auto done = own_.pieces.load();
        const auto done_by_other = other_.pieces.load();
        if (message_.is_send ? done - done_by_other >= kBuffers : done == done_by_other) return false;
        auto* const piece = communicator_.board().piece(from_, to_, done);
        const auto size = std::min(kPieceBytes, size_ - moved_);
        if (message_.is_send) {
            std::memcpy(piece, data_ + moved_, size);
        } else {
            std::memcpy(data_ + moved_, piece, size);
        }
        moved_ += size;
        own_.pieces.store(done + 1);
        communicator_.ring(message_.peer);
        return true;
    }

    Communicator& communicator_;
    const Message message_;
    const CallHead head_;
    Lane& lane_;
    const Rank from_;
    const Rank to_;
    Channel::Side& own_;
    Channel::Side& other_;
    const std::size_t size_;
    std::byte* data_ = nullptr;
    std::size_t moved_ = 0;
    bool has_begun_ = false;
    bool has_met_ = false;
};

void run(Communicator& communicator, const std::vector<Message>& messages, const std::vector<std::uint64_t>& numbers) {
    std::vector<Side> sides;
    std::vector<std::uint32_t> indices;
    sides.reserve(messages.size());
    for (std::uint32_t index = 0; index < messages.size(); ++index) {
        sides.emplace_back(communicator, messages[index], numbers[index]);
        indices.push_back(index);
    }
    std::uint32_t waiting = 0;
    communicator.await(
        {[&] { return where(communicator, sides[waiting].head()); }, communicator.execution_limit()},
        std::move(indices),
        [&](std::uint32_t index) {
            waiting = index;
            return messages[index].peer;
        },
        [&](std::uint32_t index) { return sides[index].step(); });
}

}  // namespace

std::int32_t enqueue(const std::shared_ptr<Communicator>& communicator, Function function,
                     const std::vector<Message>& messages, void* stream) {
    if (const auto refused = refused_if_captured(stream, name_of(function))) return *refused;
    std::vector<std::uint64_t> numbers;
    for (const auto& message : messages) numbers.push_back(lane_of(*communicator, message).take_number());
    auto head = Side::head(messages.front(), numbers.front());
    if (function == Function::BatchSendRecv) {
        head = {numbers.front(), function, HCCL_DATA_TYPE_RESERVED, HCCL_REDUCE_RESERVED, kNoRank, messages.size()};
    }
    const auto status = enqueue_task(communicator, head, stream,
                                     [communicator, messages, numbers] { run(*communicator, messages, numbers); });
    if (status == ACL_SUCCESS) return status;
    for (auto index = messages.size(); index-- > 0;) {
        lane_of(*communicator, messages[index]).give_back(numbers[index]);
    }
    return status;
}

}  // namespace host_npu::hccl
