// A pool of objects behind handles.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ascendcl/device.h"

namespace host_npu {

// A pool never frees memory, so reading a destroyed handle is defined behavior: it is not alive, or has another
// generation. `Handle` has `bool alive` and `std::uint64_t generation`.
template <class Handle>
class Pool {
  public:
    explicit Pool(const char* kind) : kind_(kind) {}

    Handle* take() {
        auto* const handle = unused();
        handle->alive = true;
        ++handle->generation;
        count_alive(kind_, 1);
        return handle;
    }

    // Returns false if `handle` is not alive.
    bool give_back(Handle* handle) {
        {
            const std::lock_guard lock(mutex_);
            if (!handle->alive) return false;
            handle->alive = false;
            unused_.push_back(handle);
        }
        count_alive(kind_, -1);
        return true;
    }

  private:
    Handle* unused() {
        const std::lock_guard lock(mutex_);
        if (!unused_.empty()) {
            auto* const handle = unused_.back();
            unused_.pop_back();
            return handle;
        }
        all_.push_back(std::make_unique<Handle>());
        unused_.reserve(all_.size());
        return all_.back().get();
    }

    const char* kind_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Handle>> all_;
    std::vector<Handle*> unused_;
};

}  // namespace host_npu
