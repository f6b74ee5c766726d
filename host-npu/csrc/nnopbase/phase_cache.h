// The per-thread cache of phase one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "nnopbase/call.h"

namespace host_npu {

// A cache entry. It is usable once phase two has run its call.
struct CacheEntry {
    std::shared_ptr<const Call> call;
    std::atomic<bool> usable{false};
};

class PhaseCache {
  public:
    // Configured by DISABLE_L2_CACHE (any value disables the cache) and ACLNN_CACHE_LIMIT, which are read once.
    static PhaseCache& of_this_thread();

    // Returns null if there is no usable entry.
    std::shared_ptr<const Call> find(std::string_view key);
    // Returns the new entry, which phase two makes usable, on any thread. Returns null if the key is taken: an entry
    // whose phase two failed or never ran blocks later ones.
    std::shared_ptr<CacheEntry> add(std::string_view key, std::shared_ptr<const Call> call);
    void erase(std::string_view key);

  private:
    struct Entry {
        std::string key;
        std::shared_ptr<CacheEntry> entry;
    };

    explicit PhaseCache(std::size_t limit) : limit_(limit) {}

    std::size_t limit_;
    // Most recently used first.
    std::list<Entry> entries_;
    std::unordered_map<std::string_view, std::list<Entry>::iterator> index_;
};

}  // namespace host_npu
