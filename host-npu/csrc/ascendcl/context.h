// Devices and their contexts: what a thread works with, and its settings.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "ascendcl/handles.h"
#include "ascendcl/stream.h"

namespace host_npu {

class Context {
  public:
    explicit Context(std::int32_t device) : device_(device) {}
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    std::int32_t device() const { return device_; }
    // The stream that a null handle means.
    std::shared_ptr<Stream> default_stream();
    void set_option(int option, std::int64_t value);
    std::optional<std::int64_t> option(int option) const;

  private:
    const std::int32_t device_;
    mutable std::mutex mutex_;
    std::shared_ptr<Stream> default_stream_;
    std::unordered_map<int, std::int64_t> options_;
};

Handles<Context>& contexts();

// Checks that there is a device of this number.
void require_device(std::int32_t device);

// Makes the primary context of a device the calling thread's, and creates it if there is none.
void set_current_device(std::int32_t device);
// Ends the primary context of a device after its work is done.
void reset_device(std::int32_t device);
bool has_primary_context(std::int32_t device);

void set_current_context(std::shared_ptr<Context> context);
bool has_current_context();
// Throws if the thread has none.
std::shared_ptr<Context> current_context();
std::int32_t current_device();

// The stream that the handle names, or the default stream of the current context.
std::shared_ptr<Stream> stream_of(void* handle);
std::shared_ptr<Stream> create_stream(std::uint32_t priority, std::uint32_t flags);

// Waits for all streams of a device, and throws the first fault that one left behind.
void synchronize_device(std::int32_t device, Timeout timeout);

// Options of the process, which hold where the context has none; 0 until they are set.
void set_process_option(int option, std::int64_t value);
std::int64_t process_option(int option);

}  // namespace host_npu
