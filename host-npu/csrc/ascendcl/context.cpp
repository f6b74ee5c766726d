#include "ascendcl/context.h"

#include <atomic>
#include <exception>
#include <map>
#include <string>

#include "acl/acl_rt.h"
#include "ascendcl/settings.h"

namespace host_npu {
namespace {

thread_local std::shared_ptr<Context> context_of_thread;

std::atomic<std::int32_t> next_stream_id{0};

struct PrimaryContexts {
    std::mutex mutex;
    std::map<std::int32_t, std::shared_ptr<Context>> by_device;
};

PrimaryContexts& primary_contexts() {
    static auto& all = *new PrimaryContexts;
    return all;
}

struct ProcessOptions {
    std::mutex mutex;
    std::unordered_map<int, std::int64_t> values;
};

ProcessOptions& process_options() {
    static auto& options = *new ProcessOptions;
    return options;
}

std::optional<std::int64_t> look_up(const std::unordered_map<int, std::int64_t>& values, int option) {
    const auto found = values.find(option);
    if (found == values.end()) return std::nullopt;
    return found->second;
}

}  // namespace

Context::~Context() {
    if (default_stream_) streams().remove(default_stream_.get());
}

std::shared_ptr<Stream> Context::default_stream() {
    const std::lock_guard lock(mutex_);
    if (!default_stream_) {
        default_stream_ = std::make_shared<Stream>(device_, next_stream_id++, 0, 0);
        streams().add(default_stream_);
    }
    return default_stream_;
}

void Context::set_option(int option, std::int64_t value) {
    const std::lock_guard lock(mutex_);
    options_[option] = value;
}

std::optional<std::int64_t> Context::option(int option) const {
    const std::lock_guard lock(mutex_);
    return look_up(options_, option);
}

Handles<Context>& contexts() {
    static auto& all = *new Handles<Context>("aclrtContext");
    return all;
}

void require_device(std::int32_t device) {
    if (device < 0 || device >= device_count()) {
        throw Error(ACL_ERROR_RT_INVALID_DEVICEID,
                    "there is no device " + std::to_string(device) + ": the host NPU has " +
                        std::to_string(device_count()) +
                        ", numbered from 0; HOST_NPU_DEVICES or --devices sets how many");
    }
}

void set_current_device(std::int32_t device) {
    require_device(device);
    auto& primary = primary_contexts();
    const std::lock_guard lock(primary.mutex);
    auto& context = primary.by_device[device];
    if (!context) {
        context = std::make_shared<Context>(device);
        contexts().add(context);
    }
    context_of_thread = context;
}

void reset_device(std::int32_t device) {
    require_device(device);
    synchronize_device(device, std::nullopt);
    auto& primary = primary_contexts();
    const std::lock_guard lock(primary.mutex);
    const auto found = primary.by_device.find(device);
    if (found == primary.by_device.end()) return;
    if (context_of_thread == found->second) context_of_thread.reset();
    contexts().remove(found->second.get());
    primary.by_device.erase(found);
}

bool has_primary_context(std::int32_t device) {
    require_device(device);
    auto& primary = primary_contexts();
    const std::lock_guard lock(primary.mutex);
    return primary.by_device.contains(device);
}

void set_current_context(std::shared_ptr<Context> context) { context_of_thread = std::move(context); }

bool has_current_context() { return context_of_thread != nullptr; }

std::shared_ptr<Context> current_context() {
    if (!context_of_thread) {
        throw Error(ACL_ERROR_RT_CONTEXT_NULL, "this thread has no context: call aclrtSetDevice first");
    }
    return context_of_thread;
}

std::int32_t current_device() { return current_context()->device(); }

std::shared_ptr<Stream> stream_of(void* handle) {
    return handle == nullptr ? current_context()->default_stream() : streams().get(handle);
}

std::shared_ptr<Stream> create_stream(std::uint32_t priority, std::uint32_t flags) {
    return std::make_shared<Stream>(current_device(), next_stream_id++, priority, flags);
}

void synchronize_device(std::int32_t device, Timeout timeout) {
    require_uncaptured_device(device, "to wait for a device");
    std::exception_ptr first_fault;
    for (const auto& stream : streams().all()) {
        if (stream->device() != device) continue;
        try {
            stream->synchronize(timeout);
        } catch (const Error&) {
            if (!first_fault) first_fault = std::current_exception();
        }
    }
    if (first_fault) std::rethrow_exception(first_fault);
}

void set_process_option(int option, std::int64_t value) {
    auto& options = process_options();
    const std::lock_guard lock(options.mutex);
    options.values[option] = value;
}

std::int64_t process_option(int option) {
    auto& options = process_options();
    const std::lock_guard lock(options.mutex);
    return look_up(options.values, option).value_or(0);
}

int deterministic_level() {
    std::optional<std::int64_t> level;
    if (context_of_thread) level = context_of_thread->option(ACL_OPT_DETERMINISTIC);
    return static_cast<int>(level ? *level : process_option(ACL_OPT_DETERMINISTIC));
}

namespace {

std::int32_t enqueue(void* stream, Task task) {
    return run_api("host_npu::enqueue", [&] { stream_of(stream)->enqueue(std::move(task)); });
}

}  // namespace

std::shared_ptr<Capture> capture_of(void* stream) {
    auto capture = stream_of(stream)->capture();
    if (!capture) throw Error(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not being captured");
    return capture;
}

std::int32_t enqueue(void* stream, std::string name, std::function<void()> kernel) {
    return enqueue(stream, Task{.name = std::move(name), .work = std::move(kernel)});
}

std::int32_t enqueue_launch(void* stream, const char* api, std::function<void()> kernel) {
    return enqueue(stream, Task{.name = api, .work = std::move(kernel), .launch = api});
}

std::optional<std::int32_t> refused_if_captured(void* stream, const std::string& what) {
    if (!captures_are_under_way()) return std::nullopt;
    std::shared_ptr<Capture> capture;
    const auto status = run_api("host_npu::enqueue", [&] {
        capture = stream_of(stream)->capture();
        if (!capture) return;
        capture->require_valid();
        capture->refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "the host NPU does not capture " + what);
    });
    return capture ? std::optional(status) : std::nullopt;
}

bool is_captured(void* stream) {
    const auto capture = stream_of(stream)->capture();
    if (capture) capture->require_valid();
    return capture != nullptr;
}

void rehearse(void* stream, const std::function<void()>& work) {
    const auto capture = capture_of(stream);
    const ShadowMemory::Use use(capture->shadow());
    work();
}

void record_captured(void* stream, std::string name, std::function<void()> work) {
    const auto target = stream_of(stream);
    capture_of(stream)->record(*target,
                               Task{.name = std::move(name), .work = std::move(work), .captured = Captured::recorded});
}

void refuse_captured(void* stream, const std::string& text) {
    capture_of(stream)->refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, text);
}

}  // namespace host_npu
