// The objects behind the ABI's untyped handles.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ascendcl/device.h"
#include "ascendcl/error.h"

namespace host_npu {

// The live handles of one kind, which make a stale handle an error instead of a crash. Thread-safe.
template <typename Object>
class Handles {
  public:
    explicit Handles(const char* kind) : kind_(kind) {}

    void* add(std::shared_ptr<Object> object) {
        void* const handle = object.get();
        const std::lock_guard lock(mutex_);
        objects_.emplace(handle, std::move(object));
        count_alive(kind_, 1);
        return handle;
    }

    std::shared_ptr<Object> get(const void* handle) const {
        const std::lock_guard lock(mutex_);
        return find(handle)->second;
    }

    std::shared_ptr<Object> remove(const void* handle) {
        const std::lock_guard lock(mutex_);
        const auto found = find(handle);
        auto object = found->second;
        objects_.erase(found);
        count_alive(kind_, -1);
        return object;
    }

    std::vector<std::shared_ptr<Object>> all() const {
        const std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<Object>> objects;
        objects.reserve(objects_.size());
        for (const auto& entry : objects_) objects.push_back(entry.second);
        return objects;
    }

  private:
    auto find(const void* handle) const {
        const auto found = objects_.find(handle);
        if (found == objects_.end()) {
            throw Error(ACL_ERROR_RT_INVALID_HANDLE, std::string("the handle is not a live ") + kind_);
        }
        return found;
    }

    const char* kind_;
    mutable std::mutex mutex_;
    std::unordered_map<const void*, std::shared_ptr<Object>> objects_;
};

}  // namespace host_npu
