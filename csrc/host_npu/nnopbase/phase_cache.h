// The thread's memory of the calls that phase one has seen.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "nnopbase/call.h"

namespace host_npu {

class PhaseCache {
  public:
    // DISABLE_L2_CACHE (any value) and ACLNN_CACHE_LIMIT, as the process began with.
    static PhaseCache& of_this_thread();

    std::shared_ptr<const Call> find(std::string_view key);
    void insert(std::string_view key, std::shared_ptr<const Call> call);
    void erase(std::string_view key);

  private:
    struct Entry {
        std::string key;
        std::shared_ptr<const Call> call;
    };

    explicit PhaseCache(std::size_t limit) : limit_(limit) {}

    std::size_t limit_;
    // The latest use first.
    std::list<Entry> entries_;
    std::unordered_map<std::string_view, std::list<Entry>::iterator> index_;
};

}  // namespace host_npu
