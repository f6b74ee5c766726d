#include "hccl/rendezvous.h"

#include <sys/random.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "hccl/api.h"

namespace host_npu::hccl {
namespace {

constexpr char kMagic[] = "host_npu_root";

// The content of a root info.
struct Root {
    char magic[sizeof kMagic];
    // The machine's boot ID.
    char machine[40];
    Process process;
    int descriptor;
    std::uint64_t token;
};
static_assert(sizeof(Root) <= HCCL_ROOT_INFO_BYTES);

// The shared files that this process keeps open until all ranks have joined, by token.
struct RootFiles {
    std::mutex mutex;
    std::map<std::uint64_t, File> files;
};

RootFiles& root_files() {
    static auto& all = *new RootFiles;
    return all;
}

void close_root_file(std::uint64_t token) {
    auto& all = root_files();
    const std::lock_guard lock(all.mutex);
    all.files.erase(token);
}

std::string machine_id() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    file >> id;
    return id.substr(0, sizeof(Root::machine) - 1);
}

Root root_of(const HcclRootInfo& info) {
    Root root;
    std::memcpy(&root, info.internal, sizeof root);
    if (std::memcmp(root.magic, kMagic, sizeof kMagic) != 0) {
        throw Refusal(HCCL_E_PARA, "rootInfo is not from HcclGetRootInfo of the host NPU");
    }
    return root;
}

std::chrono::seconds seconds_from(const char* variable, std::int64_t otherwise, std::int64_t least, std::int64_t most) {
    const char* const text = std::getenv(variable);
    if (text == nullptr || *text == '\0') return std::chrono::seconds(otherwise);
    std::int64_t value = 0;
    const auto* const end = text + std::strlen(text);
    const auto [stopped, error] = std::from_chars(text, end, value);
    if (error != std::errc{} || stopped != end || value < least || value > most) {
        throw Refusal(HCCL_E_PARA, std::string(variable) + " must be a whole number of seconds from " +
                                       std::to_string(least) + " to " + std::to_string(most) + ", got " + text);
    }
    return std::chrono::seconds(value);
}

File open_root(const Root& root) {
    if (machine_id() != root.machine) {
        throw Refusal(HCCL_E_TCP_CONNECT,
                      "rootInfo is of another machine: the host NPU communicates within one machine only");
    }
    const auto process = std::to_string(root.process.id);
    auto file = open_file_of(root.process.id, root.descriptor);
    if (file.descriptor() < 0 || !is_alive(root.process)) {
        throw Refusal(HCCL_E_TCP_CONNECT,
                      "process " + process +
                          ", which made rootInfo, has ended, has used it for a communicator already, "
                          "or belongs to another user");
    }
    return file;
}

void take_seat(const Board& board, Rank rank, const Process& process) {
    auto& seat = board.seat(rank);
    std::uint32_t expected = Seat::kEmpty;
    if (!seat.state.compare_exchange_strong(expected, Seat::kClaimed)) {
        throw Refusal(HCCL_E_PARA, "rank " + std::to_string(rank) + " is taken: two callers gave this number");
    }
    seat.process = process;
    seat.state = Seat::kTaken;
    for (Rank other = 0; other < board.world_size(); ++other) board.seat(other).bell.ring();
}

// Claims a free offer of this rank's seat for the sub-communicator, and returns its index.
std::uint32_t offer(Communicator& parent, std::uint64_t id, const Root& root) {
    auto& offers = parent.board().seat(parent.rank()).offers;
    for (std::uint32_t index = 0;; index = (index + 1) % kOffers) {
        std::uint32_t expected = Offer::kFree;
        if (!offers[index].state.compare_exchange_strong(expected, Offer::kTaken)) {
            parent.throw_if_failed();
            std::this_thread::yield();
            continue;
        }
        offers[index].descriptor = root.descriptor;
        offers[index].sub_communicator = id;
        offers[index].token = root.token;
        offers[index].state = Offer::kOpen;
        parent.ring_all();
        return index;
    }
}

Root find_offer(Communicator& parent, Rank leader, std::uint64_t id) {
    const auto& seat = parent.board().seat(leader);
    Root root{};
    const auto look = [&](Rank) {
        for (const auto& offer : seat.offers) {
            if (offer.state.load() != Offer::kOpen || offer.sub_communicator != id) continue;
            root.descriptor = offer.descriptor;
            root.token = offer.token;
            return Step::kDone;
        }
        return Step::kWaits;
    };
    parent.await(
        {[&] { return "to make sub-communicator " + std::to_string(id) + " of communicator " + parent.name(); },
         connect_limit()},
        {leader}, [](Rank rank) { return rank; }, look);
    std::memcpy(root.magic, kMagic, sizeof kMagic);
    machine_id().copy(root.machine, sizeof root.machine - 1);
    root.process = seat.process;
    return root;
}

HcclRootInfo as_info(const Root& root) {
    HcclRootInfo info{};
    std::memcpy(info.internal, &root, sizeof root);
    return info;
}

}  // namespace

std::chrono::seconds connect_limit() { return seconds_from("HCCL_CONNECT_TIMEOUT", 120, 1, 7200); }

Limit execution_limit() {
    const auto limit = seconds_from("HCCL_EXEC_TIMEOUT", 1836, 0, 2147483647);
    if (limit.count() == 0) return std::nullopt;
    return limit;
}

HcclRootInfo make_root_info() {
    Root root{};
    std::memcpy(root.magic, kMagic, sizeof kMagic);
    machine_id().copy(root.machine, sizeof root.machine - 1);
    root.process = this_process();
    if (getrandom(&root.token, sizeof root.token, 0) != sizeof root.token) {
        throw Error(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "getrandom failed");
    }
    auto file = make_shared_file(Board::bytes(1));
    root.descriptor = file.descriptor();
    reinterpret_cast<Header*>(Mapping(file, sizeof(Header)).start())->token = root.token;
    auto& all = root_files();
    const std::lock_guard lock(all.mutex);
    all.files.emplace(root.token, std::move(file));
    return as_info(root);
}

std::shared_ptr<Communicator> join(const HcclRootInfo& root_info, std::uint32_t world_size, Rank rank,
                                   const Settings& settings) {
    const auto root = root_of(root_info);
    const auto file = open_root(root);
    {
        const Mapping mapping(file, sizeof(Header));
        auto& header = *reinterpret_cast<Header*>(mapping.start());
        if (header.token != root.token) {
            throw Refusal(HCCL_E_TCP_CONNECT, "rootInfo was used for a communicator already");
        }
        std::uint32_t expected = 0;
        if (!header.world_size.compare_exchange_strong(expected, world_size) && expected != world_size) {
            throw Refusal(HCCL_E_PARA, "rank " + std::to_string(rank) + " gives nRanks=" + std::to_string(world_size) +
                                           " where another rank gave nRanks=" + std::to_string(expected));
        }
    }
    resize(file, Board::bytes(world_size));
    Board board(file, world_size);
    take_seat(board, rank, this_process());
    const auto name = settings.name.empty() ? "hccl_" + std::to_string(root.token) : settings.name;
    return std::make_shared<Communicator>(std::move(board), rank, name, settings.execution_limit);
}

void wait_for_all(Communicator& communicator, const HcclRootInfo& root_info) {
    std::vector<Rank> others;
    for (Rank rank = 0; rank < communicator.size(); ++rank) {
        if (rank != communicator.rank()) others.push_back(rank);
    }
    const auto has_come = [&](Rank rank) {
        return communicator.board().seat(rank).state.load() >= Seat::kTaken ? Step::kDone : Step::kWaits;
    };
    try {
        communicator.await(
            {[&] { return "to make communicator " + communicator.name(); }, connect_limit()}, std::move(others),
            [](Rank rank) { return rank; }, has_come);
    } catch (const std::exception&) {
        close_root_file(root_of(root_info).token);
        require_intact(communicator);
        throw;
    }
    close_root_file(root_of(root_info).token);
}

std::shared_ptr<Communicator> join_sub_communicator(Communicator& parent, std::span<const Rank> ranks, std::uint64_t id,
                                                    Rank rank, const Settings& settings) {
    const auto leader = ranks.front();
    const auto world_size = static_cast<std::uint32_t>(ranks.size());
    auto named = settings;
    if (named.name.empty()) named.name = parent.name() + "_sub_" + std::to_string(id);
    if (leader != parent.rank()) {
        const auto info = as_info(find_offer(parent, leader, id));
        auto communicator = join(info, world_size, rank, named);
        wait_for_all(*communicator, info);
        return communicator;
    }
    const auto info = make_root_info();
    const auto index = offer(parent, id, root_of(info));
    const auto withdraw = [&](Offer* offer) { offer->state = Offer::kFree; };
    const std::unique_ptr<Offer, decltype(withdraw)> until_all_are_there(
        &parent.board().seat(parent.rank()).offers[index], withdraw);
    auto communicator = join(info, world_size, rank, named);
    wait_for_all(*communicator, info);
    return communicator;
}

}  // namespace host_npu::hccl
