// Error handling: exceptions internally; status codes and aclGetRecentErrMsg at the ABI.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "acl/acl_base.h"
#include "ascendcl/device.h"
#include "ascendcl/wake_ups.h"

namespace host_npu {

// An invalid call or a fault, with the status code that the ABI returns.
class HOST_NPU_EXPORT Error : public std::runtime_error {
  public:
    Error(std::int32_t status, const std::string& text) : std::runtime_error(text), status_(status) {}
    std::int32_t status() const noexcept { return status_; }

  private:
    std::int32_t status_;
};

// An operation that a capture refuses. If the end of the capture also reports it, torch_npu's queue continues after it.
class HOST_NPU_EXPORT RefusedInCapture : public Error {
  public:
    RefusedInCapture(std::int32_t status, const std::string& text, bool is_reported_at_end)
        : Error(status, text), is_reported_at_end_(is_reported_at_end) {}
    bool is_reported_at_end() const noexcept { return is_reported_at_end_; }

  private:
    bool is_reported_at_end_;
};

// Throws the failure that a test injected into this call of `function`.
void throw_if_injected(const char* function);

// Reports the failure of `function` to the calling thread and returns its status.
std::int32_t failed(const char* function, std::int32_t status, const std::string& text) noexcept;

// The same for a capture's refusal. Succeeds on the thread of torch_npu's queue, because a failure would end the queue.
std::int32_t refused_in_capture(const char* function, const RefusedInCapture& refusal) noexcept;

// Makes messages visible to all threads.
void share_messages_between_threads();

// Returns the last error status of this thread; clears it if `forget`.
std::int32_t last_error(bool forget);

// Clears the last error status of this thread and its unread messages.
void forget_errors();

// Runs the body of an exported function and converts its exceptions to a status.
template <typename Body>
std::int32_t run_api(const char* function, Body&& body) noexcept {
    wake_up_in_time();
    try {
        throw_if_injected(function);
        std::forward<Body>(body)();
        return ACL_SUCCESS;
    } catch (const RefusedInCapture& refusal) {
        return refused_in_capture(function, refusal);
    } catch (const Error& error) {
        return failed(function, error.status(), error.what());
    } catch (const std::bad_alloc&) {
        return failed(function, ACL_ERROR_BAD_ALLOC, "the host is out of memory");
    } catch (const std::exception& error) {
        return failed(function, ACL_ERROR_RT_PARAM_INVALID, error.what());
    }
}

// The result of a function that is not simulated.
inline std::int32_t unsupported(const char* function, const std::string& what) noexcept {
    return run_api(function,
                   [&] { throw Error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the host NPU does not simulate " + what); });
}

// The result of a function that shares memory or events between processes. On the status above, torch_npu only warns
// and continues with an uninitialized key.
inline std::int32_t not_shared(const char* function, const std::string& what) noexcept {
    return run_api(function, [&] {
        throw Error(ACL_ERROR_FEATURE_UNSUPPORTED,
                    "the host NPU does not simulate " + what +
                        " shared between processes: send a copy on the CPU, tensor.cpu()");
    });
}

template <typename Value>
void require(const Value* value, const char* argument) {
    if (value == nullptr) throw Error(ACL_ERROR_RT_PARAM_INVALID, std::string(argument) + " is null");
}

inline void require(bool condition, const std::string& text) {
    if (!condition) throw Error(ACL_ERROR_RT_PARAM_INVALID, text);
}

// Runs the body of an exported function and stores its result in `out`.
template <typename Value, typename Body>
std::int32_t answer(const char* function, Value* out, const char* argument, const Body& body) noexcept {
    return run_api(function, [&] {
        require(out, argument);
        *out = body();
    });
}

}  // namespace host_npu
