// The thread's memory of the calls that phase one has seen.
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

// A call that phase one has seen. It is usable once phase two has run it.
struct CacheEntry {
    std::shared_ptr<const Call> call;
    std::atomic<bool> usable{false};
};

class PhaseCache {
  public:
    // DISABLE_L2_CACHE (any value) and ACLNN_CACHE_LIMIT, as the process began with.
    static PhaseCache& of_this_thread();

    // Null if there is no usable entry.
    std::shared_ptr<const Call> find(std::string_view key);
    // Returns the new entry, which phase two makes usable, in whatever thread. Null if the key is taken: an entry whose
    // phase two failed or never came is in the way of all later ones.
    std::shared_ptr<CacheEntry> add(std::string_view key, std::shared_ptr<const Call> call);
    void erase(std::string_view key);

  private:
    struct Entry {
        std::string key;
        std::shared_ptr<CacheEntry> entry;
    };

    explicit PhaseCache(std::size_t limit) : limit_(limit) {}

    std::size_t limit_;
    // The latest use first.
    std::list<Entry> entries_;
    std::unordered_map<std::string_view, std::list<Entry>::iterator> index_;
};

}  // namespace host_npu
