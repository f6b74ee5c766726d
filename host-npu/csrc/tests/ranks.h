// Several ranks of a communicator in one thread, each with its own stream.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "hccl/hccl.h"
#include "tests/device.h"

namespace test {

// The representation of an HCCL data type in memory and its ACL type; ACL_DT_UNDEFINED if ACL has none.
struct HcclType {
    HcclDataType hccl;
    aclDataType acl;
    std::size_t size;
};

inline constexpr HcclType kHcclTypes[] = {
    {HCCL_DATA_TYPE_INT8, ACL_INT8, 1},
    {HCCL_DATA_TYPE_INT16, ACL_INT16, 2},
    {HCCL_DATA_TYPE_INT32, ACL_INT32, 4},
    {HCCL_DATA_TYPE_INT64, ACL_INT64, 8},
    {HCCL_DATA_TYPE_UINT8, ACL_UINT8, 1},
    {HCCL_DATA_TYPE_UINT16, ACL_DT_UNDEFINED, 2},
    {HCCL_DATA_TYPE_UINT32, ACL_DT_UNDEFINED, 4},
    {HCCL_DATA_TYPE_UINT64, ACL_DT_UNDEFINED, 8},
    {HCCL_DATA_TYPE_FP16, ACL_FLOAT16, 2},
    {HCCL_DATA_TYPE_FP32, ACL_FLOAT, 4},
    {HCCL_DATA_TYPE_FP64, ACL_DOUBLE, 8},
    {HCCL_DATA_TYPE_BFP16, ACL_BF16, 2},
    {HCCL_DATA_TYPE_INT128, ACL_DT_UNDEFINED, 16},
    {HCCL_DATA_TYPE_HIF8, ACL_DT_UNDEFINED, 1},
    {HCCL_DATA_TYPE_FP8E4M3, ACL_DT_UNDEFINED, 1},
    {HCCL_DATA_TYPE_FP8E5M2, ACL_DT_UNDEFINED, 1},
    {HCCL_DATA_TYPE_FP8E8M0, ACL_DT_UNDEFINED, 1},
};
const HcclType& hccl_type(HcclDataType dtype);

// Returns a configuration with a limit for every wait, in seconds.
HcclCommConfig limited_to(std::int32_t seconds);

class Ranks {
  public:
    explicit Ranks(std::uint32_t size, std::optional<HcclCommConfig> config = {});
    ~Ranks();
    Ranks(const Ranks&) = delete;
    Ranks& operator=(const Ranks&) = delete;

    std::uint32_t size() const { return static_cast<std::uint32_t>(communicators_.size()); }
    HcclComm comm(std::uint32_t rank) const { return communicators_[rank]; }
    aclrtStream stream(std::uint32_t rank) const { return streams_[rank].handle; }
    void destroy(std::uint32_t rank);

    // Calls `call` for each rank; all calls must succeed.
    void each(const std::function<HcclResult(std::uint32_t)>& call) const;
    // Waits for the work of all ranks, which must succeed.
    void wait() const;
    // Waits for the work of a rank, which must fail, and returns the message.
    std::string failure_of(std::uint32_t rank) const;

  private:
    std::vector<HcclComm> communicators_;
    std::vector<Stream> streams_;
};

// One buffer per rank, with values of a type.
class Buffers {
  public:
    Buffers(HcclDataType dtype, const std::vector<std::vector<double>>& values);
    // `count` elements of the same value for each of `ranks`.
    Buffers(HcclDataType dtype, std::uint32_t ranks, std::size_t count, double value = 0);

    void* operator[](std::uint32_t rank) const { return memory_[rank].address(); }
    std::vector<double> values(std::uint32_t rank) const;
    // Checks the values on every rank.
    void expect_all(const std::vector<double>& expected, const std::string& what) const;
    void expect_rank(std::uint32_t rank, const std::vector<double>& expected, const std::string& what) const;

  private:
    aclDataType dtype_;
    std::vector<std::size_t> counts_;
    std::vector<Memory> memory_;
};

void expect_contains(const std::string& text, const std::string& part);

}  // namespace test
