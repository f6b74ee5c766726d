// aclOpExecutor, which phase one passes to phase two.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "nnopbase/call.h"
#include "nnopbase/pool.h"

namespace host_npu {

struct CacheEntry;

// The first eight bytes of an executor identify its kind.
inline constexpr std::uint64_t kComposedMagic = 0x1F2E3D4C5B6A;
inline constexpr std::uint64_t kCacheWrapperMagic = 0xAFBECDDCEBFA;
inline constexpr std::uint64_t kIndividualMagic = 0x19A312F588;

// A tensor whose address phase two reads.
struct TensorUse {
    const aclTensor* tensor;
    std::uint64_t generation;

    bool destroyed() const { return tensor != nullptr && (!tensor->alive || tensor->generation != generation); }
};

aclOpExecutor* take_executor(std::uint64_t magic);
void release(aclOpExecutor* executor);

}  // namespace host_npu

struct aclOpExecutor {
    std::uint64_t magic = 0;
    bool alive = false;
    std::uint64_t generation = 0;
    // Null in an individual executor whose phase one failed.
    std::shared_ptr<const host_npu::Call> call;
    // Composed executors: the tensors whose addresses phase two reads.
    std::vector<host_npu::TensorUse> tensors;
    // Other kinds: the addresses at the time of phase one.
    std::vector<void*> storages;
    bool repeatable = false;
    // Composed executors: the cache entry that this executor added, and its key.
    std::shared_ptr<host_npu::CacheEntry> cache_entry;
    std::string cache_key;
};
