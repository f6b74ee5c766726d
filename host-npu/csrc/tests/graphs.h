// Captures by the C interface.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "tests/device.h"

namespace test {

// CANN's status codes, some of which the headers of torch_npu 2.9 lack.
inline constexpr aclError kDependency = 107024;
inline constexpr aclError kModelCaptured = 107026;
inline constexpr aclError kStreamCaptured = 107027;
inline constexpr aclError kNotCaptured = 107029;
inline constexpr aclError kNotInThisMode = 107030;
inline constexpr aclError kUnmatched = 107036;
inline constexpr aclError kWrongThread = 107038;
inline constexpr aclError kInvalidated = 507903;
inline constexpr aclError kNoHandle = 107017;

inline constexpr auto kGlobal = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
inline constexpr auto kThreadLocal = ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL;
inline constexpr auto kRelaxed = ACL_MODEL_RI_CAPTURE_MODE_RELAXED;

inline void begin(const Stream& stream, aclmdlRICaptureMode mode = kThreadLocal) {
    expect_equal(aclmdlRICaptureBegin(stream.handle, mode), 0, "the status of the beginning");
}

inline aclmdlRI end(const Stream& stream) {
    aclmdlRI graph = nullptr;
    const auto status = aclmdlRICaptureEnd(stream.handle, &graph);
    expect(status == 0, "the end returned ", status, ": ", recent_error().value_or(""));
    expect(graph != nullptr, "there is no graph");
    return graph;
}

// Ends a capture that has no graph.
inline void end_without_graph(const Stream& stream, aclError expected, const std::string& sentence) {
    aclmdlRI graph = nullptr;
    recent_error();
    expect_equal(aclmdlRICaptureEnd(stream.handle, &graph), expected, "the status of the end");
    expect(graph == nullptr, "there is a graph");
    const auto message = recent_error().value_or("");
    expect(message.find(sentence) != message.npos, "the message is ", message);
}

inline void replay(aclmdlRI graph, const Stream& stream) {
    expect_equal(aclmdlRIExecuteAsync(graph, stream.handle), 0, "the status of the replay");
    expect_equal(stream.wait(), 0, "the synchronisation's status");
}

inline aclmdlRICaptureStatus status_of(const Stream& stream) {
    auto status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    aclmdlRI graph = nullptr;
    expect_equal(aclmdlRICaptureGetInfo(stream.handle, &status, &graph), 0, "the status of the question");
    expect_equal(graph != nullptr, status != ACL_MODEL_RI_CAPTURE_STATUS_NONE, "whether there is a graph");
    return status;
}

inline aclError fill(const Memory& memory, int value, const Stream& stream) {
    return aclrtMemsetAsync(memory.address(), memory.bytes(), value, memory.bytes(), stream.handle);
}

inline aclError copy(const Memory& to, const Memory& from, const Stream& stream) {
    return aclrtMemcpyAsync(to.address(), to.bytes(), from.address(), from.bytes(), ACL_MEMCPY_DEVICE_TO_DEVICE,
                            stream.handle);
}

inline Memory memory_of(std::uint8_t value) {
    Memory memory(4);
    memory.upload(std::vector<std::uint8_t>(4, value));
    return memory;
}

inline int first(const Memory& memory) { return memory.download()[0]; }

// An event for the order of streams.
struct Event {
    Event() { expect_equal(aclrtCreateEventExWithFlag(&handle, ACL_EVENT_SYNC), 0, "the status of the event"); }
    ~Event() { aclrtDestroyEvent(handle); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void record(const Stream& stream) const {
        expect_equal(aclrtRecordEvent(handle, stream.handle), 0, "the status of the record");
    }
    aclError wait(const Stream& stream) const { return aclrtStreamWaitEvent(stream.handle, handle); }

    aclrtEvent handle = nullptr;
};

}  // namespace test
