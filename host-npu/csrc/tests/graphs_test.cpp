// Captures that torch_npu does not make; tests/npu/test_graphs.py and test_graph_refusals.py test the rest.
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "acl/acl.h"
#include "tests/device.h"

namespace {

using namespace test;

// CANN's status codes that the headers of torch_npu 2.9 lack.
constexpr aclError kNotInThisMode = 107030;
constexpr aclError kInvalidated = 507903;

constexpr auto kGlobal = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
constexpr auto kThreadLocal = ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL;
constexpr auto kRelaxed = ACL_MODEL_RI_CAPTURE_MODE_RELAXED;

void begin(const Stream& stream, aclmdlRICaptureMode mode) {
    expect_equal(aclmdlRICaptureBegin(stream.handle, mode), 0, "the status of the beginning");
}

Memory memory_of(std::uint8_t value) {
    Memory memory(4);
    memory.upload(std::vector<std::uint8_t>(4, value));
    return memory;
}

CASE("graphs/a_mode_says_which_threads_may_copy") {
    struct Row {
        aclmdlRICaptureMode mode;
        aclmdlRICaptureMode of_thread;
        bool is_same_thread;
        bool may_copy;
    };
    const Row table[] = {
        {kGlobal, kGlobal, true, false},      {kGlobal, kGlobal, false, false}, {kGlobal, kThreadLocal, true, false},
        {kGlobal, kThreadLocal, false, true}, {kGlobal, kRelaxed, true, true},  {kThreadLocal, kGlobal, true, false},
        {kThreadLocal, kGlobal, false, true}, {kRelaxed, kGlobal, true, true},
    };
    for (const auto& row : table) {
        const Stream stream;
        const auto memory = memory_of(1);
        begin(stream, row.mode);
        aclError status = 0;
        const auto copy_in_mode = [&] {
            aclrtSetDevice(0);
            auto mode = row.of_thread;
            aclmdlRICaptureThreadExchangeMode(&mode);
            expect_equal(mode, kGlobal, "the mode before");
            status = aclrtMemset(memory.address(), 4, 0, 4);
            aclmdlRICaptureThreadExchangeMode(&mode);
            expect_equal(mode, row.of_thread, "the mode");
        };
        if (row.is_same_thread) {
            copy_in_mode();
        } else {
            std::thread(copy_in_mode).join();
        }
        expect_equal(status, row.may_copy ? 0 : kNotInThisMode, "mode ", row.mode, " and ", row.of_thread, " in the ",
                     row.is_same_thread ? "same" : "other", " thread");
        aclmdlRI graph = nullptr;
        expect_equal(aclmdlRICaptureEnd(stream.handle, &graph), row.may_copy ? 0 : kInvalidated,
                     "the status of the end");
        if (graph != nullptr) aclmdlRIDestroy(graph);
        recent_error();
    }
}

CASE("graphs/a_replay_of_memory_that_is_gone_is_a_fault") {
    const Stream stream;
    const auto kept = memory_of(1);
    aclmdlRI graph = nullptr;
    {
        const auto gone = memory_of(2);
        begin(stream, kThreadLocal);
        aclrtMemcpyAsync(kept.address(), 4, gone.address(), 4, ACL_MEMCPY_DEVICE_TO_DEVICE, stream.handle);
        aclrtMemsetAsync(kept.address(), 4, 5, 4, stream.handle);
        expect_equal(aclmdlRICaptureEnd(stream.handle, &graph), 0, "the status of the end");
    }
    expect_equal(aclmdlRIExecuteAsync(graph, stream.handle), 0, "the status of the replay");
    expect(stream.wait() != 0, "the synchronisation succeeded");
    const auto message = recent_error().value_or("");
    expect(message.find("aclrtMemcpyAsync failed on stream") != message.npos, message);
    expect_equal(kept.download()[0], 5, "what comes after the fault");
    expect_equal(aclmdlRIDestroy(graph), 0, "the status of the destruction");
}

CASE("graphs/an_ascend910_captures_nothing", {"Ascend910"}) {
    const Stream stream;
    expect(aclmdlRICaptureBegin(stream.handle, kGlobal) != 0, "the capture began");
    const auto message = recent_error().value_or("");
    expect(message.find("the Ascend910 does not capture graphs") != message.npos, message);
}

}  // namespace
