// The interface of the simulated device for the simulated operators, which libascendcl.so exports next to the ABI.
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

// The simulated chip, from the environment variable HOST_NPU_SOC; Ascend910B by default.
HOST_NPU_EXPORT Soc soc();

// Returns the address at which kernels access `device_pointer`. Throws std::out_of_range if fewer than `size` bytes of
// live device memory begin there.
HOST_NPU_EXPORT void* host_alias(const void* device_pointer, std::size_t size = 0);

// Enqueues `kernel` on `stream` (the current device's default stream if null) and returns an ACL status. An exception
// in the kernel becomes a device fault, which the next synchronization reports.
HOST_NPU_EXPORT std::int32_t enqueue(void* stream, std::string name, std::function<void()> kernel);

// Enqueues an operator's kernel and counts the launch; `api` is the name of its phase two.
HOST_NPU_EXPORT std::int32_t enqueue_launch(void* stream, const char* api, std::function<void()> kernel);

// Whether any stream of the process is being captured.
HOST_NPU_EXPORT bool captures_are_under_way();

// Whether this stream is being captured. Throws if its capture is invalid.
HOST_NPU_EXPORT bool is_captured(void* stream);

// If the stream is being captured, refuses `what`, which cannot be replayed, and returns the status of the refusal.
HOST_NPU_EXPORT std::optional<std::int32_t> refused_if_captured(void* stream, const std::string& what);

// Calls `work`, for which host_alias() returns addresses in the shadow memory of the stream's capture.
HOST_NPU_EXPORT void rehearse(void* stream, const std::function<void()>& work);

// Records work that has been rehearsed, to run in every replay of the captured stream.
HOST_NPU_EXPORT void record_captured(void* stream, std::string name, std::function<void()> work);

// Makes the stream's capture invalid and throws, as a device does for operations that a capture forbids.
[[noreturn]] HOST_NPU_EXPORT void refuse_captured(void* stream, const std::string& text);

// Sets the message that aclGetRecentErrMsg returns next on this thread, with the error code for `status`.
HOST_NPU_EXPORT void report_error(std::int32_t status, const std::string& text);

// Records a failed call of torch_npu's queue, on its thread. report_error() calls it.
HOST_NPU_EXPORT void note_failure(const std::string& text);

// On the thread of torch_npu's queue, makes the next call of another thread that computes or reads raise `text`, once,
// and returns true: the queue continues. On other threads, returns false.
HOST_NPU_EXPORT bool refuse_after_queue(const std::string& text);

// The determinism level of the current context, or else of the process; 0 is none.
HOST_NPU_EXPORT int deterministic_level();

// Counts a launch of an operator; `api` is the name of its phase two.
HOST_NPU_EXPORT void count_launch(const char* api);

// Counts a call of a communication function, and the bytes of the caller's data that other ranks read.
HOST_NPU_EXPORT void count_collective(const char* function, std::int64_t bytes);

// Adds `delta` to the number of live objects of a kind, such as "aclTensor".
HOST_NPU_EXPORT void count_alive(const char* kind, int delta);

// Returns the failure that a test injected into this call of `function`, if any. Every function that can fail calls
// this exactly once per call, which also counts its calls.
HOST_NPU_EXPORT std::optional<std::pair<std::int32_t, std::string>> injected_failure(const char* function);

}  // namespace host_npu
