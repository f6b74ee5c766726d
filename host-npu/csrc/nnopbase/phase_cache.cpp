#include "nnopbase/phase_cache.h"

#include <algorithm>
#include <cstdlib>

namespace host_npu {
namespace {

constexpr std::size_t kDefaultLimit = 10'000;
constexpr std::size_t kMaximalLimit = 10'000'000;

std::size_t limit_from_environment() {
    if (std::getenv("DISABLE_L2_CACHE") != nullptr) return 0;
    const char* const limit = std::getenv("ACLNN_CACHE_LIMIT");
    if (limit == nullptr) return kDefaultLimit;
    char* end = nullptr;
    const auto number = std::strtoull(limit, &end, 10);
    return end == limit || *end != '\0' ? kDefaultLimit : std::min<std::size_t>(number, kMaximalLimit);
}

}  // namespace

PhaseCache& PhaseCache::of_this_thread() {
    static const auto limit = limit_from_environment();
    thread_local PhaseCache cache(limit);
    return cache;
}

std::shared_ptr<const Call> PhaseCache::find(std::string_view key) {
    const auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    const auto& entry = *found->second->entry;
    return entry.usable ? entry.call : nullptr;
}

std::shared_ptr<CacheEntry> PhaseCache::add(std::string_view key, std::shared_ptr<const Call> call) {
    if (limit_ == 0 || index_.contains(key)) return nullptr;
    if (entries_.size() == limit_) {
        index_.erase(entries_.back().key);
        entries_.pop_back();
    }
    auto entry = std::make_shared<CacheEntry>();
    entry->call = std::move(call);
    entries_.push_front({std::string(key), entry});
    index_.emplace(entries_.front().key, entries_.begin());
    return entry;
}

void PhaseCache::erase(std::string_view key) {
    const auto found = index_.find(key);
    if (found == index_.end()) return;
    const auto entry = found->second;
    index_.erase(found);
    entries_.erase(entry);
}

}  // namespace host_npu
