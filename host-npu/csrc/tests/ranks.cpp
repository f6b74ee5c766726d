#include "tests/ranks.h"

namespace test {

const HcclType& hccl_type(HcclDataType dtype) {
    for (const auto& type : kHcclTypes) {
        if (type.hccl == dtype) return type;
    }
    throw Failure("there is no such type");
}

HcclCommConfig limited_to(std::int32_t seconds) {
    HcclCommConfig config;
    HcclCommConfigInit(&config);
    config.hcclExecTimeOut = seconds;
    return config;
}

Ranks::Ranks(std::uint32_t size, std::optional<HcclCommConfig> config) : communicators_(size), streams_(size) {
    HcclRootInfo root_info;
    expect_equal(HcclGetRootInfo(&root_info), HCCL_SUCCESS, "HcclGetRootInfo's status");
    expect_equal(HcclGroupStart(), HCCL_SUCCESS, "HcclGroupStart's status");
    for (std::uint32_t rank = 0; rank < size; ++rank) {
        const auto status = config ? HcclCommInitRootInfoConfig(size, &root_info, rank, &*config, &communicators_[rank])
                                   : HcclCommInitRootInfo(size, &root_info, rank, &communicators_[rank]);
        expect_equal(status, HCCL_SUCCESS, "the status of making rank ", rank);
    }
    expect_equal(HcclGroupEnd(), HCCL_SUCCESS, "HcclGroupEnd's status");
}

Ranks::~Ranks() {
    for (std::uint32_t rank = 0; rank < size(); ++rank) destroy(rank);
}

void Ranks::destroy(std::uint32_t rank) {
    if (communicators_[rank] != nullptr) HcclCommDestroy(std::exchange(communicators_[rank], nullptr));
}

void Ranks::each(const std::function<HcclResult(std::uint32_t)>& call) const {
    for (std::uint32_t rank = 0; rank < size(); ++rank) {
        const auto status = call(rank);
        expect(status == HCCL_SUCCESS, "rank ", rank, ": status ", status, ": ", recent_error().value_or(""));
    }
}

void Ranks::wait() const {
    for (std::uint32_t rank = 0; rank < size(); ++rank) {
        const auto status = streams_[rank].wait();
        expect(status == 0, "rank ", rank, ": status ", status, ": ", recent_error().value_or(""));
    }
}

std::string Ranks::failure_of(std::uint32_t rank) const {
    expect(streams_[rank].wait() != 0, "the work of rank ", rank, " has not failed");
    const auto message = recent_error();
    expect(message.has_value(), "the failure of rank ", rank, " has no message");
    return *message;
}

Buffers::Buffers(HcclDataType dtype, const std::vector<std::vector<double>>& values) : dtype_(hccl_type(dtype).acl) {
    for (const auto& each : values) {
        counts_.push_back(each.size());
        memory_.emplace_back(each.size() * item_size(dtype_));
        memory_.back().upload(encode(dtype_, each));
    }
}

Buffers::Buffers(HcclDataType dtype, std::uint32_t ranks, std::size_t count, double value)
    : Buffers(dtype, std::vector<std::vector<double>>(ranks, std::vector<double>(count, value))) {}

std::vector<double> Buffers::values(std::uint32_t rank) const { return decode(dtype_, memory_[rank].download()); }

void Buffers::expect_all(const std::vector<double>& expected, const std::string& what) const {
    for (std::uint32_t rank = 0; rank < memory_.size(); ++rank) expect_rank(rank, expected, what);
}

void Buffers::expect_rank(std::uint32_t rank, const std::vector<double>& expected, const std::string& what) const {
    expect_close(values(rank), expected, 0, join(what, " of rank ", rank));
}

void expect_contains(const std::string& text, const std::string& part) {
    expect(text.find(part) != std::string::npos, "\"", text, "\" does not say \"", part, "\"");
}

}  // namespace test
