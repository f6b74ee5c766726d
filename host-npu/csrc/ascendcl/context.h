// Devices and contexts: those current on a thread, and their settings.
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
    // The stream that a null handle denotes.
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

// Throws if the device does not exist.
void require_device(std::int32_t device);

// Makes the primary context of a device current on the calling thread, creating it if needed.
void set_current_device(std::int32_t device);
// Destroys the primary context of a device once its work is done.
void reset_device(std::int32_t device);
bool has_primary_context(std::int32_t device);

void set_current_context(std::shared_ptr<Context> context);
bool has_current_context();
// Throws if the thread has no current context.
std::shared_ptr<Context> current_context();
std::int32_t current_device();

// The stream of a handle; for null, the default stream of the current context.
std::shared_ptr<Stream> stream_of(void* handle);
// Throws if the stream is not being captured.
std::shared_ptr<Capture> capture_of(void* stream);
std::shared_ptr<Stream> create_stream(std::uint32_t priority, std::uint32_t flags);

// Synchronizes all streams of a device, and throws the first fault.
void synchronize_device(std::int32_t device, Timeout timeout);

// Process-wide options, used where the context does not set them; 0 by default.
void set_process_option(int option, std::int64_t value);
std::int64_t process_option(int option);

}  // namespace host_npu
