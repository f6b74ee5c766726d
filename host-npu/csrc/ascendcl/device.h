// What the simulated device offers to the simulated operators. libascendcl.so exports it next to the published ABI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#define HOST_NPU_EXPORT __attribute__((visibility("default")))

namespace host_npu {

enum class Soc { Ascend910, Ascend910B, Ascend910_93, Ascend310P, Ascend950 };

// The simulated chip: the environment variable HOST_NPU_SOC, Ascend910B if it is not set.
HOST_NPU_EXPORT Soc soc();

// Returns where kernels read and write the memory that the host knows as `device_pointer`. Throws std::out_of_range if
// it does not point into live device memory, or if less than `size` bytes of it follow.
HOST_NPU_EXPORT void* host_alias(const void* device_pointer, std::size_t size = 0);

// Appends `kernel` to the work of `stream` (null is the current device's default stream) and returns an ACL status.
// An exception in the kernel becomes a device fault that the next synchronisation reports.
HOST_NPU_EXPORT std::int32_t enqueue(void* stream, std::string name, std::function<void()> kernel);

// The same for the launch of the operator whose phase two is `api`, which is counted.
HOST_NPU_EXPORT std::int32_t enqueue_launch(void* stream, const char* api, std::function<void()> kernel);

// Whether any stream of the process is being captured.
HOST_NPU_EXPORT bool captures_are_under_way();

// Whether this stream is; throws if its capture is invalid.
HOST_NPU_EXPORT bool is_captured(void* stream);

// If the stream is being captured, refuses `what`, which cannot be repeated, and returns the status of that.
HOST_NPU_EXPORT std::optional<std::int32_t> refused_if_captured(void* stream, const std::string& what);

// Calls `work` with host_alias() in the memory of the stream's capture: a copy, which captured work has changed.
HOST_NPU_EXPORT void rehearse(void* stream, const std::function<void()>& work);

// Appends work, which has been rehearsed, to what replays of the captured stream do.
HOST_NPU_EXPORT void record_captured(void* stream, std::string name, std::function<void()> work);

// Makes the stream's capture invalid and throws, as a device does for what a capture excludes.
[[noreturn]] HOST_NPU_EXPORT void refuse_captured(void* stream, const std::string& text);

// Sets what aclGetRecentErrMsg returns next in this thread, under the error code that belongs to `status`.
HOST_NPU_EXPORT void report_error(std::int32_t status, const std::string& text);

// Remembers a call that fails, if it is one of torch_npu's queue; report_error() does so too.
HOST_NPU_EXPORT void note_failure(const std::string& text);

// In the thread of torch_npu's queue, lets the next call of another thread that computes or reads raise `text`, once,
// and returns true: the queue goes on. Returns false in other threads.
HOST_NPU_EXPORT bool refuse_after_queue(const std::string& text);

// The determinism that the current context, else the process, asks for: 0 is none.
HOST_NPU_EXPORT int deterministic_level();

// Counts a launch of the operator whose phase two is `api`.
HOST_NPU_EXPORT void count_launch(const char* api);

// Counts a call of a function that communicates, and the bytes that others read of the caller's data.
HOST_NPU_EXPORT void count_collective(const char* function, std::int64_t bytes);

// Adds `delta` to the number of live objects of a kind, for instance "aclTensor".
HOST_NPU_EXPORT void count_alive(const char* kind, int delta);

// Returns the failure that a test asked for in this call of `function`, if any. Every function that can fail asks once
// in every call, which is how it is known.
HOST_NPU_EXPORT std::optional<std::pair<std::int32_t, std::string>> injected_failure(const char* function);

}  // namespace host_npu
